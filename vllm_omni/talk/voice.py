# SPDX-License-Identifier: Apache-2.0
"""The voice of `talk`: Hibari, an English synthesizer of 6 million parameters that runs on one core."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch

from vllm_omni.function_stage import FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.talk.packages import require_packages
from vllm_omni.talk.speakable import split_code

if TYPE_CHECKING:
    import hibari

require_packages("hibari", "onnxruntime")  # Where the pipeline is opened, before any stage starts.
# Else onnxruntime, once imported, reports over the network what it is used for.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class VoiceParameters(msgspec.Struct):
    """
    Attributes:
        voice: A name of `Voice.voices`.
        speed: Factor on the voice's own.
        seed: Of the noise in the sound: the same text, window by window, and seed give the same samples.
    """

    voice: str = "heart"
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass
class _Reply:
    """A request's state: the noise goes on, and a block of code may end, in a later window."""

    voice: "hibari.Hibari"
    speed: float
    noise: np.random.Generator
    in_code: bool = False


class Voice(FunctionStage):
    """Speaks the text of its source: `audio`, float32 `[samples]` in -1 to 1, 24,000 for each second.

    Text in Markdown is spoken as a reader would (`speakable`). Each sentence of a window is a piece of the output.
    """

    parameters = VoiceParameters

    @classmethod
    def voices(cls) -> Sequence[str]:
        """Those whose files are on this machine: `heart` is in the package, others after `hibari --voice NAME`."""
        from hibari.voices import VOICES

        return sorted(filter(_is_here, VOICES), key=lambda name: name != VoiceParameters().voice)

    def start(self) -> None:
        self._load = functools.cache(_load_voice)
        self._load(VoiceParameters().voice)

    def begin(self, request: StageRequest, parameters: VoiceParameters) -> _Reply:
        voice = self._load(parameters.voice.lower())
        return _Reply(voice, parameters.speed, np.random.default_rng(parameters.seed))

    def window(self, state: _Reply, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        (source,) = sources.values()
        text, state.in_code = split_code(source.completions[0].text, state.in_code)
        said = False
        for phonemes in state.voice.phonemize(text):
            said = True
            yield {"audio": torch.from_numpy(state.voice.from_ids(state.voice.ids(phonemes), state.speed, state.noise))}
        if not said:
            yield {"audio": torch.empty(0)}


def _is_here(name: str) -> bool:
    from hibari.voices import voice_path

    try:
        return Path(voice_path(name, download_missing=False)).is_file()
    except FileNotFoundError:
        return False


def _load_voice(name: str) -> "hibari.Hibari":
    """Ready to speak: the first sentence also loads the dictionary.

    Raises:
        ValueError: Its file is not on this machine.
    """
    from hibari import Hibari

    if name not in Voice.voices():
        raise ValueError(f"there is no voice {name!r} here; there is {', '.join(Voice.voices())}")
    voice = Hibari(name)
    voice("Hello.")
    return voice
