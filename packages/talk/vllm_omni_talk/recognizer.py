# SPDX-License-Identifier: Apache-2.0
"""Another recognizer for `talk`: PocketSphinx with its own English models, without a vLLM engine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_omni.function_stage import SOUND_RATE, FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni_talk.packages import require_packages
from vllm_omni_talk.speech_recognition import make_decoder, recognize, to_input

require_packages("pocketsphinx")  # Where the pipeline is opened, before any stage starts.


class Recognizer(FunctionStage):
    """Hears the `audio` of a caller or a source, float32 `[samples]` in -1 to 1, 16,000 a second; makes `text`.

    The text is in lower case and has no punctuation, after the last window. It is good enough for clear, slow speech
    without noise; of people in a room, or with an accent, these models from before neural networks miss much. A request
    may be of any length, and its sound is recognized at the end.
    """

    def start(self) -> None:
        self._decoder = make_decoder()

    def begin(self, request: StageRequest, parameters: Any) -> list[np.ndarray]:
        return []

    def window(self, state: list[np.ndarray], sources: Mapping[int, StageOutput]) -> dict[str, Any]:
        (source,) = sources.values()
        audio: torch.Tensor = source.tensors["audio"]
        state.append(to_input(audio.flatten().numpy(), SOUND_RATE))
        return {}

    def end(self, state: list[np.ndarray]) -> dict[str, Any]:
        return {"text": recognize(self._decoder, np.concatenate(state)) if state else ""}
