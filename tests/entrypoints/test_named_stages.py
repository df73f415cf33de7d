# SPDX-License-Identifier: Apache-2.0
"""Requests that begin at a stage that they name, with what they give it, and run the stages behind it alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.spoken_functions import ASR, LOOKING, NUM_SAMPLES, SPEAKING, WRITING_STAGE
from tests.orchestrator.pipelines import fake_stage, make_config
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.outputs import OmniRequestOutput

STAGES = (WRITING_STAGE, SPEAKING | {"accepts": "text"}, ASR)
LLM = fake_stage(1, "b", (), "text") | {"engine_type": "AR"}
EDGES = [{"from": 0, "to": 1, "unit": "sentences"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    with running(OmniLLM, tmp_path_factory.mktemp("config"), STAGES, edges=EDGES) as llm:
        yield llm


def stages_of(output: OmniRequestOutput) -> list[str]:
    return [stage.name for stage in output.stage_metrics]


def windows_of(audio: torch.Tensor) -> list[int]:
    """Characters of each window, whose samples have the other sign than those before."""
    ends = (audio.diff().nonzero().flatten() + 1).tolist()
    return [(stop - start) // NUM_SAMPLES for start, stop in zip([0, *ends], [*ends, len(audio)], strict=True)]


def test_a_request_that_names_no_stage(llm: OmniLLM) -> None:
    text, speech = llm.generate("One. Two.", use_tqdm=False)
    assert text.outputs[0].text == "One. Two." and windows_of(speech.multimodal_output["audio"]) == [5, 4]
    assert stages_of(speech) == ["writer", "voice"]


def test_a_text_is_spoken_by_the_speaking_stage_alone_in_the_same_windows(llm: OmniLLM) -> None:
    (speech,) = llm.generate({"stage": "voice", "prompt": "One. Two."}, use_tqdm=False)
    assert stages_of(speech) == ["voice"] and windows_of(speech.multimodal_output["audio"]) == [5, 4]


def test_a_sound_is_transcribed_by_the_asr_stage_alone(llm: OmniLLM) -> None:
    sound = (np.zeros(24_000, np.float32), 24_000)
    prompt: Any = {"stage": "asr", "multi_modal_data": {"audio": sound}}
    (text,) = llm.generate(prompt, use_tqdm=False)
    assert stages_of(text) == ["asr"] and text.outputs[0].text == "It has 16000 samples. It is en."


@pytest.fixture(scope="module")
def reading_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    stages = (LOOKING, SPEAKING | {"accepts": "text"})
    with running(OmniLLM, tmp_path_factory.mktemp("config"), stages, edges=EDGES) as llm:
        yield llm


@pytest.mark.parametrize(
    "picture",
    [
        Image.new("RGBA", (4, 3), (255, 0, 0, 255)),
        [Image.new("RGB", (4, 3), "red")],
        np.full((3, 4, 3), (255, 0, 0), np.uint8),
        torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 3, 4),
    ],
)
@pytest.mark.parametrize("named", [{}, {"stage": "reader"}])
def test_an_image_is_read_upright_in_colour(reading_llm: OmniLLM, picture: Any, named: dict[str, str]) -> None:
    prompt: Any = {"prompt": "Now.", "multi_modal_data": {"image": picture}, **named}
    text, speech = reading_llm.generate(prompt, use_tqdm=False)
    assert text.outputs[0].text == "It is 4 by 3. It begins with [255, 0, 0]. Now."
    assert windows_of(speech.multimodal_output["audio"]) == [14, 28, 4]


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({}, "'reader' takes one image, not 0"),
        ({"image": [Image.new("L", (2, 2))] * 2}, "'reader' takes one image, not 2"),
        ({"image": "page.png"}, "open it first"),
        ({"image": Image.new("1", (1 << 14, 1 << 13))}, "67108864"),
    ],
)
def test_wrong_images_are_refused(reading_llm: OmniLLM, media: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        reading_llm.generate({"prompt": "Now.", "multi_modal_data": media}, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"stage": "writer", "prompt": "x"}, "no stage 'writer' that accepts .*it has voice, asr"),
        ({"stage": "voice", "prompt": " "}, "prompt is empty"),
        ({"stage": "voice"}, "prompt must be a string"),
        ({"stage": "voice", "prompt": "x", "modalities": ["text"]}, "cannot output 'text'"),
        ({"stage": "asr", "prompt": "x"}, "there is no sound: .*audio.* must be .waveform"),
        ({"stage": "asr", "multi_modal_data": {"audio": None}}, "there is no sound"),
        ({"stage": 1, "prompt": "x"}, "stage must be the name of a stage"),
    ],
)
def test_wrong_prompts_are_refused(llm: OmniLLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, use_tqdm=False)


def test_the_part_of_a_pipeline_that_a_request_runs() -> None:
    config = make_config(*STAGES)
    assert config.output_types == ["text", "audio"] and config.stages_for(["text", "audio"]) == [0, 1]
    assert config.stages_for(["audio"], 1) == [1] and config.stages_for(["text"], 3) == [3]
    assert config.final_stages(["text"], 3) == [3] and config.final_stages(["text"]) == [0]
    assert config.accepting_stage("audio", "text") == config.stages[3]
    assert config.accepting_stage("text", "audio") == config.stages[1]
    assert config.accepting_stage("text", "text") is None
    assert make_config(ASR).stages_for(["text"]) == [3], "there is no other"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (fake_stage(1, "b", (0,), "audio"), "accepts is for stages with a function"),
        (LLM | {"engine_type": "transformers", "accepts": "image"}, "accepts is for stages"),
        (SPEAKING | {"accepts": "video"}, "Invalid enum value 'video'"),
        (SPEAKING | {"final_output": False}, "accepts: no output for callers follows"),
        (LLM, "accepts is for stages with a function"),
        (LLM | {"accepts": "audio", "engine_input_source": [0]}, "accepts: audio also for AR stages without sources"),
        (LLM | {"accepts": "audio", "function": "operator.neg"}, "engine_type AR has no function"),
        (LLM | {"accepts": "audio", "final_output_type": "audio"}, "an AR stage that accepts audio makes text"),
        (LLM | {"accepts": "audio", "custom_prompt_func": "operator.neg"}, "vLLM makes the prompt of a sound"),
    ],
)
def test_senseless_stages_are_refused(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(StageConfigError, match=message):
        make_config(WRITING_STAGE, {"accepts": "text"} | stage)
