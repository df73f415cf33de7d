# SPDX-License-Identifier: Apache-2.0
"""A pipeline of functions: one writes a text, a `FunctionStage` speaks it; its samples show its parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import torch

from tests.orchestrator.pipelines import function_stage
from vllm_omni.function_stage import CALLER, FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

RATE = 16000
NUM_SAMPLES = 400  # of each character


class SpeakingParameters(msgspec.Struct):
    voice: str = "Ann"
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0
    language: str | None = None
    pitch: int = 0


@dataclass
class Speech:
    parameters: SpeakingParameters
    num_windows: int = 0


class SpeakingStage(FunctionStage):
    """Each character is a constant: `level` of its voice, negative in every second window."""

    parameters = SpeakingParameters

    @classmethod
    def voices(cls) -> tuple[str, ...]:
        return ("Ann", "Bob")

    def begin(self, request: StageRequest, parameters: SpeakingParameters) -> Speech:
        return Speech(parameters)

    def window(self, state: Speech, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        value = level(state.parameters.voice) * (-1) ** state.num_windows
        state.num_windows += 1
        num_samples = round(NUM_SAMPLES / state.parameters.speed)
        for _ in sources[0].completions[0].text:
            yield {"audio": torch.full((num_samples,), value)}


def level(voice: str) -> float:
    return {"Ann": 0.25, "Bob": 0.5}[voice]


def write(request: StageRequest, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
    for character in request.prompt or "":
        yield {"text": character}


class ASRParameters(msgspec.Struct):
    language: Literal["en", "de"] = "en"


class ASRStage(FunctionStage):
    """Writes the length of a sound, as two sentences."""

    parameters = ASRParameters

    def begin(self, request: StageRequest, parameters: ASRParameters) -> ASRParameters:
        return parameters

    def window(self, state: ASRParameters, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        sound = sources[CALLER].tensors["audio"]
        yield {"text": f"It has {len(sound)} samples. "}
        yield {"text": f"It is {state.language}."}


ASR = function_stage(3, "asr", ASRStage, (), "text") | {"accepts": "audio"}
WRITING_STAGE = function_stage(0, "writer", write, (), "text")
SPEAKING = function_stage(1, "voice", SpeakingStage, (0,), "audio") | {"sample_rate": RATE}
