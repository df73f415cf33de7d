# SPDX-License-Identifier: Apache-2.0
"""The voice of `talk`: Hibari, an English synthesizer of 6 million parameters that runs on one core."""

import functools
import logging
import os
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch

from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import CALLER, FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import ContextLogger, about
from vllm_omni.outputs import StageOutput
from vllm_omni_talk.packages import require_packages
from vllm_omni_talk.speakable import split_code

if TYPE_CHECKING:
    import hibari

require_packages("hibari", "onnxruntime")  # Where the pipeline is opened, before any stage starts.
# Else onnxruntime, once imported, reports over the network what it is used for.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

logger = logging.getLogger("vllm.omni.talk")

_MAX_PHONEMES = 400
"""That are spoken at once: the memory grows with their square, and Hibari itself cuts sentences at clauses only."""
_LETTER = re.compile(r"[^\W\d_]")


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
class _SpeechState:
    """A request's state: the noise goes on, and a block of code may end, in a later window.

    Attributes:
        is_of_caller: The text is a caller's, not a source's reply.
        has_spoken: Some of the text has made sound.
        left_out: Letters that the voice does not know, by script.
    """

    request_id: str
    voice: "hibari.Hibari"
    speed: float
    noise: np.random.Generator
    in_code: bool = False
    is_of_caller: bool = False
    has_spoken: bool = False
    left_out: Counter[str] = field(default_factory=Counter)


class Voice(FunctionStage):
    """Speaks the text of its source: `audio`, float32 `[samples]` in -1 to 1, 24,000 for each second.

    Text in Markdown is spoken as a reader would (`speakable`). Each sentence of a window is a piece of the output; one
    that cannot be spoken is left out. A reply of a source may have nothing to say, a caller's text is refused then.
    """

    parameters = VoiceParameters
    model_kind = "transformers"

    @classmethod
    def voices(cls) -> Sequence[str]:
        """Those whose files are on this machine: `heart` is in the package, others after `hibari --voice NAME`."""
        from hibari.voices import VOICES

        return sorted(filter(_is_here, VOICES), key=lambda name: name != VoiceParameters().voice)

    def start(self) -> None:
        self._load = functools.cache(_load_voice)
        self._load(VoiceParameters().voice)

    def begin(self, request: StageRequest, parameters: VoiceParameters) -> _SpeechState:
        voice = self._load(parameters.voice.lower())
        return _SpeechState(request.request_id, voice, parameters.speed, np.random.default_rng(parameters.seed))

    def window(self, state: _SpeechState, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        (source,) = sources.values()
        state.is_of_caller = source.stage_id == CALLER
        text, state.in_code = split_code(source.completions[0].text, state.in_code)
        known = state.voice.g2p.oov.cin
        state.left_out.update(_script(letter) for letter in _LETTER.findall(text) if letter not in known)
        for sentence in state.voice.split_sentences(text):
            for phonemes in self._phonemes(state, sentence):
                state.has_spoken = True
                samples = state.voice.from_ids(state.voice.ids(phonemes), state.speed, state.noise)
                yield {"audio": torch.from_numpy(samples)}
        if not state.has_spoken:
            yield {"audio": torch.empty(0)}

    def end(self, state: _SpeechState) -> None:
        """
        Raises:
            InvalidRequestError: A caller's text has nothing to say.
        """
        if state.left_out:
            letters = ", ".join(f"{number} {script}" for script, number in sorted(state.left_out.items()))
            self._log(state).warning("the voice leaves out letters that it does not know: %s", letters)
        if state.is_of_caller and not state.has_spoken:
            raise InvalidRequestError(
                "the text has no words that this voice can speak: it speaks English, and leaves out code, emoji and "
                "letters that it does not know",
                state.request_id,
            )

    def _phonemes(self, state: _SpeechState, sentence: str) -> list[str]:
        """The phonemes of a sentence, in parts that the voice speaks at once; empty if there is nothing to hear."""
        try:
            parts = state.voice.phonemize(sentence)
        except Exception:
            self._log(state).exception("a sentence of %d characters cannot be spoken and is left out", len(sentence))
            return []
        pieces = chain.from_iterable(textwrap.wrap(part, _MAX_PHONEMES, break_on_hyphens=False) for part in parts)
        return [phonemes for phonemes in pieces if any(map(str.isalpha, phonemes))]

    def _log(self, state: _SpeechState) -> ContextLogger:
        return about(logger, request_id=state.request_id, stage=self.stage.label)


def _script(letter: str) -> str:
    """The first word of a letter's name: CJK, THAI."""
    return unicodedata.name(letter, "unknown").partition(" ")[0]


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
