# SPDX-License-Identifier: Apache-2.0
"""Requests that share a diffusion stage: each has its own adapter and previews, and no others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from vllm.lora.request import LoRARequest

from vllm_omni import CompletedEvent, ErrorEvent, ImageProgressEvent, OmniLLM
from vllm_omni.diffusion.preview import estimate_clean, make_preview
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora

NUM_STEPS = 5
PREVIEW_SIZE = 32
SETTINGS = {"height": 32, "width": 64, "num_inference_steps": NUM_STEPS, "seed": 3, "output_format": "np"}
PROMPTS = ["a hen", "two ships under a red moon"]


@pytest.fixture(scope="module")
def model(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("z_image")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[OmniLLM]:
    """Keeps fewer adapters than the requests of a test use."""
    with OmniLLM(str(model), max_loras=2, preview_size=PREVIEW_SIZE) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    files = [str(write_tiny_diffusion_lora(model, folder / str(seed), seed)) for seed in range(3)]
    return [LoRARequest(f"style{i}", i + 1, file) for i, file in enumerate(files)]


@pytest.fixture(scope="module")
def bare(model: Path) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate_with_diffusers(pipe: DiffusionPipeline, prompt: str, on_step: Any = None) -> np.ndarray:
    """float32 `[height, width, 3]`."""
    settings = {**SETTINGS, "generator": torch.Generator().manual_seed(SETTINGS["seed"]), "output_type": "np"}
    del settings["seed"], settings["output_format"]
    return pipe(prompt, callback_on_step_end=on_step, **settings).images[0]


def events_of(llm: OmniLLM, prompts: list[str], lora_request: Any = None, **settings: Any) -> dict[str, list]:
    """Each request's events, in the order of the prompts."""
    events: dict[str, list] = {}
    for event in llm.generate(prompts, {**SETTINGS, **settings}, stream=True, lora_request=lora_request):
        events.setdefault(event.request_id, []).append(event)
    return {request_id: events[request_id] for request_id in sorted(events, key=int)}


def image_of(events: list) -> np.ndarray:
    assert isinstance(events[-1], CompletedEvent)
    return events[-1].outputs[0].images[0]


def assert_same(image: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def diffusers_image(bare: DiffusionPipeline, adapters: list[LoRARequest]) -> Callable[[str, int | None, float], Any]:
    """Images of diffusers itself for a prompt, an adapter or none, and a scale."""
    images = {(prompt, None, 1.0): generate_with_diffusers(bare, prompt) for prompt in PROMPTS}
    for index, adapter in enumerate(adapters):
        bare.load_lora_weights(adapter.lora_path, adapter_name=adapter.lora_name)
        for scale in (1.0, 0.5):
            bare.set_adapters([adapter.lora_name], [scale])
            images |= {(prompt, index, scale): generate_with_diffusers(bare, prompt) for prompt in PROMPTS}
    bare.unload_lora_weights()
    return lambda prompt, index, scale: images[prompt, index, scale]


def test_requests_with_and_without_adapters_share_a_stage(llm, adapters, diffusers_image):
    requests = [(prompt, index) for index in (None, 0, 1, 2, 0, None) for prompt in PROMPTS]
    adapter_of = [None if index is None else adapters[index] for _prompt, index in requests]
    outputs = llm.generate([prompt for prompt, _index in requests], SETTINGS, use_tqdm=False, lora_request=adapter_of)

    for (prompt, index), output in zip(requests, outputs, strict=True):
        assert_same(output.images[0], diffusers_image(prompt, index, 1.0))
    styles = [diffusers_image(PROMPTS[0], index, 1.0) for index in (None, 0, 1, 2)]
    differences = [np.abs(a - b).max() for i, a in enumerate(styles) for b in styles[:i]]
    assert min(differences) > 0.02, "adapters that change nothing would prove nothing"


def test_one_adapter_with_a_scale_for_each_request(llm, adapters, diffusers_image):
    streams = {
        scale: llm.generate(
            PROMPTS, {**SETTINGS, "lora_scale": scale}, stream=True, lora_request=[adapters[0], adapters[0]]
        )
        for scale in (1.0, 0.5)
    }
    for scale, events in streams.items():
        done = [event for event in events if isinstance(event, CompletedEvent)]
        done.sort(key=lambda event: int(event.request_id))
        for prompt, event in zip(PROMPTS, done, strict=True):
            assert_same(event.outputs[0].images[0], diffusers_image(prompt, 0, scale))


def test_an_invalid_adapter_file_fails_only_its_request(llm, adapters, diffusers_image, model):
    weights = str(model / "transformer")
    requests = [adapters[0], LoRARequest("whole", 9, weights), None]
    good, bad, plain = events_of(llm, [PROMPTS[0]] * 3, requests).values()

    assert_same(image_of(good), diffusers_image(PROMPTS[0], 0, 1.0))
    assert_same(image_of(plain), diffusers_image(PROMPTS[0], None, 1.0))
    assert isinstance(bad[-1], ErrorEvent)
    assert "LoRA adapter 'whole'" in str(bad[-1].error) and "has weights that are no LoRA" in str(bad[-1].error)


def progress_of(events: list) -> list[ImageProgressEvent]:
    return [event for event in events if isinstance(event, ImageProgressEvent)]


def test_only_requests_with_preview_every_have_previews(llm):
    for events in events_of(llm, PROMPTS).values():
        assert [event.step for event in progress_of(events)] == list(range(NUM_STEPS))
        assert all(event.image is None for event in progress_of(events))


def test_previews_come_every_n_steps_and_do_not_change_the_image(llm, diffusers_image):
    for prompt, events in zip(PROMPTS, events_of(llm, PROMPTS, preview_every=2).values(), strict=True):
        previews = {event.step: event.image for event in progress_of(events) if event.image is not None}
        assert list(previews) == [1, 3]
        assert all((image.dtype, image.shape) == (torch.uint8, (16, 32, 3)) for image in previews.values())
        assert not torch.equal(previews[1], previews[3])
        assert_same(image_of(events), diffusers_image(prompt, None, 1.0))


def test_each_output_of_a_request_has_previews_of_its_own(llm):
    (events,) = events_of(llm, PROMPTS[:1], preview_every=3, num_outputs_per_prompt=2, seed=[7, 8]).values()
    previews = {event.index: event.image for event in progress_of(events) if event.image is not None}
    assert sorted(previews) == [0, 1]
    assert not torch.equal(previews[0], previews[1])


def test_a_preview_shows_the_estimate_for_a_straight_flow(llm, bare):
    latents: list[torch.Tensor] = []

    def keep(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, torch.Tensor]) -> dict:
        latents.append(tensors["latents"])
        return {}

    generate_with_diffusers(bare, PROMPTS[0], keep)
    clean = estimate_clean(bare.scheduler, 3, latents[2], latents[3])
    expected, raw = (make_preview(bare, x, 32, 64, PREVIEW_SIZE).float() for x in (clean, latents[3]))
    (events,) = events_of(llm, PROMPTS[:1], preview_every=4).values()
    (preview,) = [event.image.float() for event in progress_of(events) if event.image is not None]
    assert (preview - expected).abs().max() <= 1
    assert (raw - expected).abs().max() > 10, "an estimate that changes nothing would prove nothing"
