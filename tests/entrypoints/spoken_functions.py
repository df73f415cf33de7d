# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline that writes a text, and speaks it in a `FunctionStage` whose samples show its parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

from tests.orchestrator.pipelines import function_stage
from vllm_omni.function_stage import CALLER, FunctionStage, NoParameters
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

RANDOM = {"max_tokens": 60, "seed": 1, "temperature": 1.0, "ignore_eos": True}
"""Sampling parameters of a long text with sentences."""

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


def think(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """The prompt, as often as torch counts."""
    return {"text": int(torch.ones(1).sum()) * (request.prompt or "")}


class EditingStage(FunctionStage):
    """The text of its source, as often as torch multiplies."""

    def begin(self, request: StageRequest, parameters: NoParameters) -> None:
        return None

    def window(self, state: None, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
        return {"text": int(torch.ones(1).prod()) * sources[0].completions[0].text}


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


class LookingStage(FunctionStage):
    """Writes the size and the first pixel of an image, as two sentences, and then the request's text."""

    def begin(self, request: StageRequest, parameters: NoParameters) -> str:
        return request.prompt or ""

    def window(self, state: str, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
        image = sources[CALLER].tensors["image"]
        height, width, _ = image.shape
        yield {"text": f"It is {width} by {height}. "}
        if state == "fail":
            raise ValueError("the page is upside down")
        yield {"text": f"It begins with {image[0, 0].tolist()}. {state}"}


def writer(model: Path, **sampling: Any) -> dict[str, Any]:
    """A vLLM stage that writes; `sampling`: its default sampling parameters."""
    return {
        "stage_id": 0,
        "engine_args": {
            "model": str(model),
            "model_stage": "writer",
            "max_model_len": 256,
            "enforce_eager": True,
            "max_num_seqs": 4,
        },
        "final_output": True,
        "final_output_type": "text",
        "runtime": {"memory": "64MiB"},
        "default_sampling_params": sampling,
    }


LOOKING = function_stage(0, "reader", LookingStage, (), "text") | {"accepts": "image"}
ASR = function_stage(3, "asr", ASRStage, (), "text") | {"accepts": "audio"}
WRITING_STAGE = function_stage(0, "writer", write, (), "text")
SPEAKING = function_stage(1, "voice", SpeakingStage, (0,), "audio") | {"sample_rate": RATE}
THINKING = function_stage(0, "thinker", think)
EDITING = function_stage(1, "editor", EditingStage, (0,))
