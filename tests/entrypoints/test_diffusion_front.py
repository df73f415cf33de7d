# SPDX-License-Identifier: Apache-2.0
"""Pipelines with diffusion stages as their callers see them: how they are opened, asked, and refuse."""

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
from tests.entrypoints.fake_pipelines import quick_servers
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
    """A diffusers checkpoint by its path, and nothing else said."""
    with quick_servers():
        llm = OmniLLM(str(tiny_diffusion("z_image")))
    with llm:
        yield llm


def test_any_way_to_give_the_settings_of_one_stage_gives_the_same_picture(llm: OmniLLM) -> None:
    settings = {**SMALL, "seed": 1}
    ways: list[Any] = [settings, [settings], DiffusionSamplingParams(**settings), [DiffusionSamplingParams(**settings)]]

    pictures = [llm.generate("a hen", way, use_tqdm=False)[0].images[0] for way in ways]

    assert pictures[0].shape == (32, 32, 3) and pictures[0].std() > 0
    for picture in pictures[1:]:
        np.testing.assert_array_equal(picture, pictures[0])


def test_an_image_and_what_is_unwanted_change_the_picture(llm: OmniLLM) -> None:
    settings = {**SMALL, "seed": 1, "guidance_scale": 4.0}
    prompts: list[Any] = [
        {"prompt": "a hen"},
        {"prompt": "a hen", "negative_prompt": "snow, ice, night"},
        {"prompt": "a hen", "multi_modal_data": {"image": PICTURE}},
    ]

    plain, unlike, alike = (output.images[0] for output in llm.generate(prompts, settings, use_tqdm=False))

    assert np.abs(plain - unlike).max() > 1e-3 and np.abs(plain - alike).max() > 1e-3


def test_refusals_name_the_mistake_and_the_pipeline_goes_on(llm: OmniLLM) -> None:
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


def test_the_asynchronous_face_takes_the_same(llm: OmniLLM, async_llm: AsyncOmniLLM) -> None:
    async def last_event() -> Any:
        events = [event async for event in async_llm.generate("a hen", {**SMALL, "seed": 1}, "mine")]
        return events[-1]

    end = asyncio.run(last_event())

    assert isinstance(end, CompletedEvent) and end.request_id == "mine"
    expected = llm.generate("a hen", {**SMALL, "seed": 1}, use_tqdm=False)[0].images[0]
    np.testing.assert_array_equal(end.outputs[0].images[0], expected)


# What the stages are told; no stage is started.


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_index(tmp_path_factory.mktemp("painter"), "FluxPipeline")


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
def rewriting(tiny_qwen3: Path, painter: str) -> RequestBuilder:
    """A language model that writes the prompt of a painter, who also sees the caller's images."""
    return make_builder(
        stage(0, "writer", str(tiny_qwen3), final_output_type="text", max_model_len=64, dtype="float32"),
        stage(
            1,
            "painter",
            painter,
            (0,),
            engine_type="DiT",
            final_output_type="image",
            runtime={"requires_multimodal_data": True},
        ),
    )


def told(builder: RequestBuilder, prompt: Any, params: Any = None, lora: Any = None) -> dict[int, StageRequest]:
    return builder.build(prompt, params, lambda event: None, lora_request=lora).stages


def test_the_painters_images_and_settings_are_not_the_writers(rewriting: RequestBuilder) -> None:
    prompt = {"prompt": "a hen", "negative_prompt": "snow", "multi_modal_data": {"image": PICTURE}}

    writer, painter = told(rewriting, prompt, [{"max_tokens": 5}, {"seed": 4}]).values()

    assert writer.engine_request is not None and writer.diffusion is None
    assert writer.sampling_params is not None and writer.sampling_params.max_tokens == 5
    assert not writer.engine_request.mm_features and writer.prompt_token_ids
    assert painter.engine_request is None and painter.sampling_params is None and painter.diffusion is not None
    assert (painter.diffusion.seeds, painter.diffusion.params.negative_prompt) == ([4], "snow")
    assert [image.shape for image in painter.diffusion.images] == [(32, 32, 3)]


def test_who_wants_no_picture_has_none_prepared(rewriting: RequestBuilder) -> None:
    assert list(told(rewriting, {"prompt": "a hen", "modalities": ["text"]})) == [0]


def test_parameters_are_not_mixed_up(rewriting: RequestBuilder) -> None:
    for params, words in (
        ([DiffusionSamplingParams(), None], "stage 'writer' generates tokens"),
        ([None, SamplingParams()], "DiffusionSamplingParams"),
        ({"seed": 4}, r"one entry for each of the 2 stages \(writer, painter\)"),
        (DiffusionSamplingParams(), r"one entry for each of the 2 stages"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            told(rewriting, "a hen", params)


def test_an_adapter_is_for_the_first_stage_or_whoever_denoises_for_it(painter: str, tmp_path: Path) -> None:
    paints = {"engine_type": "DiT", "final_output_type": "image"}
    parts = make_builder(
        stage(0, "encoder", painter, part="encoder", **paints),
        stage(1, "denoiser", painter, (0,), part="denoiser", **paints),
    )
    whole = make_builder(stage(0, "painter", painter, **paints), stage(1, "again", painter, (0,), **paints))
    adapter = LoRARequest("ink", 1, str(tmp_path))

    for builder, expected in ((parts, [None, "ink"]), (whole, ["ink", None])):
        requests = told(builder, "a hen", lora=adapter)
        assert [request.diffusion and request.diffusion.lora_name for request in requests.values()] == expected


def test_a_pipeline_that_paints_nothing_has_no_use_for_what_is_unwanted(text_builder: RequestBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="negative_prompt is for diffusion stages"):
        told(text_builder, {"prompt": "a hen", "negative_prompt": "snow"})


def test_a_pipeline_of_one_writer_takes_parameters_without_a_list(text_builder: RequestBuilder) -> None:
    for params in (SamplingParams(max_tokens=3), {"max_tokens": 3}):
        (request,) = told(text_builder, "a hen", params).values()
        assert request.sampling_params is not None and request.sampling_params.max_tokens == 3


@pytest.fixture(scope="module")
def text_builder(tiny_qwen3: Path) -> RequestBuilder:
    return make_builder(
        stage(0, "writer", str(tiny_qwen3), final_output_type="text", max_model_len=64, dtype="float32")
    )


def test_a_stage_input_processor_knows_the_diffusers_checkpoint(painter: str) -> None:
    config = OmniStageConfig(stage_id=1, engine_type="DiT", custom_process_input_func=PROCESSOR)
    processor = load_stage_input_processor(config, painter)

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
def test_a_stage_that_is_fed_is_checked_as_any_other(painter: str, change: dict[str, Any], words: str) -> None:
    fed = stage(1, "painter", painter, (0,), engine_type="DiT", final_output_type="image")
    source = {"stage_id": 0, "engine_type": "fake"}

    with pytest.raises(StageConfigError, match=rf"stage 1 \(painter\): .*{words}"):
        parse_pipeline_config({"stage_args": [source, fed | change]}, "this test")
