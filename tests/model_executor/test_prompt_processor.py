# SPDX-License-Identifier: Apache-2.0
"""What prompt processors refuse, and how their results reach the first stage and the other stages' processors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.prompt_processor import PromptProcessor, read_choice, read_sound, read_text

PATH = "tests.model_executor.test_prompt_processor.Echoing"
REF = "ref_audio"


class Echoing(PromptProcessor):
    """The text twice, with the length of a sound."""

    fields: ClassVar[tuple[str, ...]] = ("prompt", "speaker", REF)

    @property
    def voices(self) -> tuple[str, ...]:
        return ("ada", "ben")

    def process(self, given: Mapping[str, Any]) -> StageInput:
        ids = self.tokenizer.encode(read_text(given["prompt"], "prompt"))
        speaker = read_choice(given.get("speaker", "ada"), "speaker", self.voices)
        information: dict[str, Any] = {"speaker": speaker}
        if REF in given:
            information["sound"] = read_sound(given[REF], REF, 16000, max_seconds=2)
        return StageInput(
            prompt_token_ids=ids + ids, additional_information=information, stop_token_ids=[7], max_tokens=5
        )


@pytest.fixture(scope="module")
def builder(tiny_qwen3: Path) -> RequestBuilder:
    stage = {
        "stage_id": 0,
        "engine_args": {"max_model_len": 128},
        "custom_prompt_func": PATH,
        "final_output": True,
        "final_output_type": "text",
        "default_sampling_params": {"max_tokens": 9},
    }
    return RequestBuilder(parse_pipeline_config({"stage_args": [stage]}, "this test"), str(tiny_qwen3))


def build(builder: RequestBuilder, **prompt: Any) -> Any:
    return builder.build({**prompt}, None, lambda event: None).stages[0]  # type: ignore[misc]


def test_the_result_is_the_first_stages_prompt(builder: RequestBuilder) -> None:
    sound = (np.zeros(800, dtype=np.int16), 8000)
    plain = build(builder, prompt="hello there")
    stage = build(builder, prompt="hello there", additional_information={"speaker": "Ben", REF: sound})
    ids = stage.engine_request.prompt_token_ids
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]
    assert ids == plain.engine_request.prompt_token_ids
    information = stage.engine_request.additional_information.to_dict()
    assert (information["speaker"], information["sound"].shape) == ("ben", (1600,))
    assert (stage.options, plain.options) == ({"speaker": "ben"}, {"speaker": "ada"})
    params = stage.engine_request.sampling_params
    assert (params.max_tokens, params.stop_token_ids[-1]) == (5, 7)
    assert builder.voices == ["ada", "ben"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "no 'prompt', which this model needs"),
        ({"prompt": " "}, "prompt is empty"),
        ({"prompt": "a", "multi_modal_data": {"audio": []}}, "reads no 'multi_modal_data'.*speaker, ref_audio"),
        ({"messages": [{"role": "user", "content": "a"}]}, "reads no 'messages'"),
        ({"prompt": "a", "additional_information": {"speeker": "ada"}}, "no 'speeker'.*did you mean 'speaker'"),
        ({"prompt": "a", "additional_information": {"speaker": "bon"}}, "unknown speaker 'bon'.*'ben'.*ada, ben"),
        ({"prompt": "a", "additional_information": {"speaker": 3}}, "unknown speaker 3"),
        ({"prompt": "a", "additional_information": {REF: "a.wav"}}, "ref_audio must be \\(waveform, samples"),
        ({"prompt": "a", "additional_information": {REF: (np.zeros(9), 0)}}, "ref_audio: 0 is no number of samples"),
        ({"prompt": "a", "additional_information": {REF: (np.zeros(0), 8000)}}, "at most 2 s, not of 0 s"),
        ({"prompt": "a", "additional_information": {REF: (np.zeros(80000), 8000)}}, "at most 2 s, not of 10 s"),
        ({"prompt": "a", "additional_information": {REF: (np.full(80, np.nan), 8000)}}, "not finite"),
        ({"prompt": "a", "additional_information": {REF: (["a"], 8000)}}, "must be numbers"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(builder: RequestBuilder, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        build(builder, **prompt)


@pytest.mark.parametrize("wave", [np.array([[1, -1, 3, 5]] * 3), np.array([[1, -1, 3, 5]] * 3).T, [1.0, -1, 3, 5]])
def test_sounds_of_any_layout_are_mono(wave: Any) -> None:
    wave = torch.tensor(wave).float() / 8
    expected = torch.tensor([1, -1, 3, 5]) / 8
    assert torch.equal(read_sound((wave, 24000), "a", 24000, 1), expected)
    assert torch.equal(read_sound(((wave * 2**15).short().numpy(), 24000), "a", 24000, 1), expected)


def test_a_sound_is_resampled() -> None:
    times = torch.arange(48000) / 48000
    sound = read_sound((torch.sin(2 * torch.pi * 440 * times), 48000), "a", 24000, 1)
    expected = torch.sin(2 * torch.pi * 440 * torch.arange(24000) / 24000)
    assert sound.shape == (24000,)
    torch.testing.assert_close(sound[1000:-1000], expected[1000:-1000], rtol=0, atol=1e-2)


@pytest.mark.parametrize("stage", [{"engine_input_source": [0]}, {"engine_type": "function", "function": "math.sin"}])
def test_only_a_vllm_stage_without_sources_has_one(stage: dict[str, Any]) -> None:
    final = {"final_output": True, "final_output_type": "text", "custom_prompt_func": PATH}
    stages = [{"stage_id": 0, "engine_args": {"model_stage": "first"}}, {"stage_id": 1, **final, **stage}]
    with pytest.raises(StageConfigError, match="custom_prompt_func is for vLLM stages that read the prompt"):
        parse_pipeline_config({"stage_args": stages}, "this test")
