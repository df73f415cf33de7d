# SPDX-License-Identifier: Apache-2.0
"""A pipeline of functions: one writes a text, a `FunctionStage` speaks it; its samples show its parameters."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import torch

from tests.orchestrator.pipelines import function_stage
from vllm_omni.function_stage import FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

RATE = 16000
NUM_SAMPLES = 400  # of each character


class SpeakingParameters(msgspec.Struct):
    voice: str = "Ann"
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0
    language: str | None = None
    pitch: int = 0


class SpeakingStage(FunctionStage):
    """Each character is a constant: `level` of its voice."""

    parameters = SpeakingParameters

    @classmethod
    def voices(cls) -> tuple[str, ...]:
        return ("Ann", "Bob")

    def begin(self, request: StageRequest, parameters: SpeakingParameters) -> SpeakingParameters:
        return parameters

    def window(self, state: SpeakingParameters, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        text = sources[0].completions[0].text if 0 in sources and sources[0].completions else ""
        yield {"audio": torch.full((round(len(text) * NUM_SAMPLES / state.speed),), level(state.voice))}

    def end(self, state: SpeakingParameters) -> dict[str, Any]:
        return {"used": msgspec.to_builtins(state)}


def level(voice: str) -> float:
    return {"Ann": 0.25, "Bob": 0.5}[voice]


def write(request: StageRequest, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
    for character in request.prompt or "":
        yield {"text": character}


WRITING_STAGE = function_stage(0, "writer", write, (), "text")
SPEAKING = function_stage(1, "voice", SpeakingStage, (0,), "audio") | {"sample_rate": RATE}
