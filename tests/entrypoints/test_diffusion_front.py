# SPDX-License-Identifier: Apache-2.0
"""Pipelines with diffusion stages: opening, requests, and errors."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PretrainedConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.diffusion.indexes import write_index
from tests.entrypoints.conftest import as_async
from vllm_omni import AsyncOmniLLM, CompletedEvent, OmniLLM
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.sampling_params import DiffusionSamplingParams

SMALL = {"height": 32, "width": 32, "num_inference_steps": 2, "output_format": "np"}
PICTURE = Image.new("RGB", (32, 32), "red")
PROCESSOR = "tests.diffusion.rewriting.RewrittenPrompt"


@pytest.fixture(scope="module")
def llm(tiny_diffusion: Callable[[str], Path]) -> Iterator[OmniLLM]:
    """A diffusers checkpoint without other arguments."""
    with OmniLLM(str(tiny_diffusion("z_image"))) as llm:
        yield llm


def test_all_forms_of_sampling_parameters_are_equivalent(llm: OmniLLM) -> None:
    settings = {**SMALL, "seed": 1}
    ways: list[Any] = [settings, [settings], DiffusionSamplingParams(**settings), [DiffusionSamplingParams(**settings)]]

    pictures = [llm.generate("a hen", way, use_tqdm=False)[0].images[0] for way in ways]

    assert pictures[0].shape == (32, 32, 3) and pictures[0].std() > 0
    for picture in pictures[1:]:
        np.testing.assert_array_equal(picture, pictures[0])


def test_image_and_negative_prompt_change_the_output(llm: OmniLLM) -> None:
    settings = {**SMALL, "seed": 1, "guidance_scale": 4.0}
    prompts: list[Any] = [
        {"prompt": "a hen"},
        {"prompt": "a hen", "negative_prompt": "snow, ice, night"},
        {"prompt": "a hen", "multi_modal_data": {"image": PICTURE}},
    ]

    plain, with_negative, with_image = (output.images[0] for output in llm.generate(prompts, settings, use_tqdm=False))

    assert np.abs(plain - with_negative).max() > 1e-3 and np.abs(plain - with_image).max() > 1e-3


def test_errors_name_the_mistake_and_the_pipeline_continues(llm: OmniLLM) -> None:
    for prompt, params, words in (
        ("", None, "prompt is empty"),
        ("a hen", {"heigth": 64}, "did you mean 'height'"),
        ("a hen", SamplingParams(), "DiffusionSamplingParams"),
        ("a hen", [None, None], r"one entry for each of the 1 stages \(diffusion\)"),
        ({"prompt": "a hen", "modalities": ["audio"]}, None, r"cannot output 'audio'.*\['image'\]"),
        ({"prompt": "a hen", "negative": "x"}, None, "did you mean 'negative_prompt'"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            llm.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    assert len(llm.generate("a hen", SMALL, use_tqdm=False)) == 1


@pytest.fixture(scope="module")
def async_llm(llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(llm)


def test_async_omni_llm_equals_omni_llm(llm: OmniLLM, async_llm: AsyncOmniLLM) -> None:
    async def last_event() -> Any:
        events = [event async for event in async_llm.generate("a hen", {**SMALL, "seed": 1}, "mine")]
        return events[-1]

    end = asyncio.run(last_event())

    assert isinstance(end, CompletedEvent) and end.request_id == "mine"
    expected = llm.generate("a hen", {**SMALL, "seed": 1}, use_tqdm=False)[0].images[0]
    np.testing.assert_array_equal(end.outputs[0].images[0], expected)


# Requests of stages; no stage is started.


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_index(tmp_path_factory.mktemp("dit"), "FluxPipeline")


def stage(stage_id: int, name: str, model: str, sources: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """A final stage; `part` and the like are engine arguments."""
    engine_args = {key: more.pop(key) for key in ("part", "max_model_len", "dtype") if key in more}
    stage = {
        "stage_id": stage_id,
        "engine_args": {"model_stage": name, "model": model, **engine_args},
        "engine_input_source": list(sources),
        "final_output": True,
        **more,
    }
    return stage | ({"custom_process_input_func": PROCESSOR} if sources else {})


def make_builder(*stages: dict[str, Any]) -> RequestBuilder:
    return RequestBuilder(parse_pipeline_config({"stage_args": list(stages)}, "this test"), "")


@pytest.fixture(scope="module")
def rewriting(tiny_qwen3: Path, dit: str) -> RequestBuilder:
    """A language model that writes the prompt of a diffusion stage, which also reads the prompt's images."""
    return make_builder(
        stage(0, "writer", str(tiny_qwen3), final_output_type="text", max_model_len=64, dtype="float32"),
        stage(
            1,
            "dit",
            dit,
            (0,),
            engine_type="DiT",
            final_output_type="image",
            runtime={"requires_multimodal_data": True},
        ),
    )


def build(builder: RequestBuilder, prompt: Any, params: Any = None, lora: Any = None) -> dict[int, StageRequest]:
    return builder.build(prompt, params, lambda event: None, lora_request=lora).stages


def test_images_and_settings_of_a_diffusion_stage_are_not_for_other_stages(rewriting: RequestBuilder) -> None:
    prompt = {"prompt": "a hen", "negative_prompt": "snow", "multi_modal_data": {"image": PICTURE}}

    writer, dit = build(rewriting, prompt, [{"max_tokens": 5}, {"seed": 4}]).values()

    assert writer.engine_request is not None and writer.diffusion is None
    assert writer.sampling_params is not None and writer.sampling_params.max_tokens == 5
    assert not writer.engine_request.mm_features and writer.prompt_token_ids
    assert dit.engine_request is None and dit.sampling_params is None and dit.diffusion is not None
    assert (dit.diffusion.seeds, dit.diffusion.params.negative_prompt) == ([4], "snow")
    assert [image.shape for image in dit.diffusion.images] == [(32, 32, 3)]


def test_modalities_without_image_skip_the_diffusion_stage(rewriting: RequestBuilder) -> None:
    assert list(build(rewriting, {"prompt": "a hen", "modalities": ["text"]})) == [0]


def test_parameters_of_the_wrong_kind_are_refused(rewriting: RequestBuilder) -> None:
    for params, words in (
        ([DiffusionSamplingParams(), None], "stage 'writer' generates tokens"),
        ([None, SamplingParams()], "DiffusionSamplingParams"),
        ({"seed": 4}, r"one entry for each of the 2 stages \(writer, dit\)"),
        (DiffusionSamplingParams(), r"one entry for each of the 2 stages"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            build(rewriting, "a hen", params)


def test_an_adapter_is_for_the_first_stage_or_its_denoiser(dit: str, tmp_path: Path) -> None:
    image_stage = {"engine_type": "DiT", "final_output_type": "image"}
    parts = make_builder(
        stage(0, "encoder", dit, part="encoder", **image_stage),
        stage(1, "denoiser", dit, (0,), part="denoiser", **image_stage),
    )
    whole = make_builder(stage(0, "dit", dit, **image_stage), stage(1, "again", dit, (0,), **image_stage))
    adapter = LoRARequest("ink", 1, str(tmp_path))

    for builder, expected in ((parts, [None, "ink"]), (whole, ["ink", None])):
        requests = build(builder, "a hen", lora=adapter)
        assert [request.diffusion and request.diffusion.lora_name for request in requests.values()] == expected


def test_negative_prompt_needs_a_diffusion_stage(text_builder: RequestBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="negative_prompt is for diffusion stages"):
        build(text_builder, {"prompt": "a hen", "negative_prompt": "snow"})


def test_a_pipeline_of_one_stage_takes_parameters_without_a_list(text_builder: RequestBuilder) -> None:
    for params in (SamplingParams(max_tokens=3), {"max_tokens": 3}):
        (request,) = build(text_builder, "a hen", params).values()
        assert request.sampling_params is not None and request.sampling_params.max_tokens == 3


@pytest.fixture(scope="module")
def text_builder(tiny_qwen3: Path) -> RequestBuilder:
    return make_builder(
        stage(0, "writer", str(tiny_qwen3), final_output_type="text", max_model_len=64, dtype="float32")
    )


def test_a_stage_input_processor_has_the_diffusers_configuration(dit: str) -> None:
    config = OmniStageConfig(stage_id=1, engine_type="DiT", custom_process_input_func=PROCESSOR)
    processor = load_stage_input_processor(config, dit)

    assert processor is not None and isinstance(processor.hf_config, PretrainedConfig)
    assert processor.hf_config._class_name == "FluxPipeline"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"custom_process_input_func": None}, "custom_process_input_func is missing"),
        ({"stage_type": "llm"}, "contradicts engine_type"),
        ({"final_output_type": None}, "needs final_output_type"),
    ],
)
def test_a_diffusion_stage_with_sources_is_checked(dit: str, change: dict[str, Any], words: str) -> None:
    reader = stage(1, "dit", dit, (0,), engine_type="DiT", final_output_type="image")
    source = {"stage_id": 0, "engine_type": "fake"}

    with pytest.raises(StageConfigError, match=rf"stage 1 \(dit\): .*{words}"):
        parse_pipeline_config({"stage_args": [source, reader | change]}, "this test")
