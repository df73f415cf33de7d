# SPDX-License-Identifier: Apache-2.0
"""Every tiny pipeline, opened by its folder alone, makes what bare diffusers makes: alone, and among other requests."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from tests.diffusion.tiny_calls import NEED_IMAGES, NEED_PACKAGES, SMALLEST, images_for, make_image
from vllm_omni import OmniLLM
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

# Each pipeline's setting for another guidance than the default.
NEGATIVE = {"negative_prompt": "grey and quiet"}
GUIDED: dict[str, dict[str, Any]] = {
    "ace_step": {"guidance_scale": 2.0},
    "flux": {**NEGATIVE, "true_cfg_scale": 3.0},
    "flux2_klein": {"guidance_scale": 1.0},
    "hunyuan_video_15": NEGATIVE,
    "kandinsky5": {**NEGATIVE, "guidance_scale": 1.0},
    "longcat_audio_dit": {**NEGATIVE, "guidance_scale": 2.0},
    "ltx2": {**NEGATIVE, "stg_scale": 1.0, "audio_stg_scale": 0.5, "spatio_temporal_guidance_blocks": [1]},
    "qwen_image": {**NEGATIVE, "true_cfg_scale": 2.5},
    "qwen_image_edit": {**NEGATIVE, "true_cfg_scale": 2.5},
    "qwen_image_edit_plus": {**NEGATIVE, "true_cfg_scale": 2.5},
    "qwen_image_layered": {**NEGATIVE, "true_cfg_scale": 2.5},
    "stable_audio": {**NEGATIVE, "guidance_scale": 2.0},
    "stable_diffusion_3": {**NEGATIVE, "guidance_scale": 3.0},
    "wan": {**NEGATIVE, "guidance_scale": 3.0},
    "wan_i2v": {**NEGATIVE, "guidance_scale": 3.0},
    "z_image": {**NEGATIVE, "guidance_scale": 2.0},
}
SMALLER: dict[str, dict[str, Any]] = {
    "ace_step": {"audio_duration": 0.2},
    "longcat_audio_dit": {"audio_duration_s": 0.2},
    "ltx2": {"height": 64, "width": 96},
    "qwen_image_layered": {"layers": 1},
    "stable_audio": {"audio_end_in_s": 0.2},
}
SEVERAL_IMAGES = ("flux2_klein", "qwen_image_edit_plus")
IMAGE_TO_IMAGE = ("flux", "qwen_image", "stable_diffusion_3", "z_image")


class Request(NamedTuple):
    """A request, as arguments of the diffusers pipeline."""

    prompt: str
    seed: int
    call: dict[str, Any]
    images: list[Image.Image]

    @property
    def omni_prompt(self) -> Any:
        if not self.images:
            return self.prompt
        images = [image.convert("RGB") for image in self.images]  # where there is alpha it is opaque
        return {"prompt": self.prompt, "multi_modal_data": {"image": images[0] if len(images) == 1 else images}}

    @property
    def params(self) -> dict[str, Any]:
        fields = DiffusionSamplingParams.__struct_fields__
        known = {key: value for key, value in self.call.items() if key in fields}
        others = {key: value for key, value in self.call.items() if key not in fields}
        return {**known, "extra_args": others, "seed": self.seed, "output_format": "np"}


def different_requests(name: str) -> list[Request]:
    """The first two can be computed together; others differ from them in what they go through. Four run at a time."""
    small = SMALLEST[name]
    smaller = {"num_inference_steps": 3, **SMALLER.get(name, {"height": 32, "width": 96})}
    requests = [
        Request("a red cat", 1, small, images_for(name)),
        Request("the wind in a tree at night, " * 3, 2, small, images_for(name, seed=1)),
        Request("two ships", 3, {**small, **smaller}, images_for(name)),
        Request("a house on a hill", 4, {**small, **GUIDED[name]}, images_for(name)),
    ]
    if name in IMAGE_TO_IMAGE:
        requests.append(Request("a dog", 5, {**small, "strength": 0.5}, [make_image(0, 64, 64)]))
    if name == "hunyuan_video_15":  # what is to be written in the picture has an encoder of its own
        requests.append(Request('a shop with the sign "open"', 5, small, []))
    if name == "ace_step":  # which pads nothing: only prompts of one length go together
        requests.insert(1, Request("a red dog", 5, small, []))
    if name in SEVERAL_IMAGES:
        requests.append(Request("a dog", 5, small, [make_image(0, 64, 64), make_image(1, 96, 64)]))
    return requests


FAST = ("wan", "z_image")


@pytest.fixture(
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(SMALLEST)]
)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(NEED_PACKAGES.get(request.param, "torch"))
    return request.param


@pytest.fixture
def llm(name: str, tiny_diffusion: Callable[[str], Path]) -> Iterator[OmniLLM]:
    with OmniLLM(str(tiny_diffusion(name)), batch_wait_ms=50) as llm:  # so that they do meet
        yield llm


def made_by(llm: OmniLLM, request: Request) -> list[np.ndarray]:
    (output,) = llm.generate(request.omni_prompt, request.params, use_tqdm=False)
    sound = output.multimodal_output.get("audio", ())
    assert (output.sample_rate is not None) == (len(sound) > 0)
    images = [np.stack(output.images)] if "layers" in request.call else output.images
    return [np.asarray(made[0]) for made in (images, output.videos, sound) if len(made)]


def test_a_request_alone_and_in_a_batch_equals_diffusers(
    name: str, llm: OmniLLM, tiny_diffusion: Callable[[str], Path]
) -> None:
    requests = different_requests(name)
    oracle = DiffusersOracle(tiny_diffusion(name))
    expected = [
        oracle.generate_all(request.prompt, seed=request.seed, images=request.images, **request.call)
        for request in requests
    ]
    check_reference(name, oracle, expected[0][0])

    assert_equal(made_by(llm, requests[0]), expected[0])
    with ThreadPoolExecutor(len(requests)) as threads:
        made = list(threads.map(lambda request: made_by(llm, request), requests))
    for one, other in zip(made, expected, strict=True):
        assert_equal(one, other)


def check_reference(name: str, oracle: DiffusersOracle, made: torch.Tensor) -> None:
    """A reference whose output hardly depends on its inputs would prove nothing.

    Args:
        made: What it makes of "a red cat" with seed 1.
    """

    def make(prompt: str = "a red cat", **changes: Any) -> torch.Tensor:
        return oracle.generate(prompt, **{"seed": 1, "images": images_for(name), **SMALLEST[name], **changes})

    def difference(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().mean())

    assert difference(make(seed=0), made) > 0.1 * made.std()
    assert difference(make("the wind in a tree at night"), made) > 0.1 * made.std()
    if made.shape[-1] in (3, 4):  # pixels
        assert made.std() > 0.1 and ((made == 0) | (made == 1)).float().mean() < 0.1
    if "negative_prompt" in GUIDED[name]:
        guided = {"true_cfg_scale": 4.0} if name == "flux" else {}
        is_dark = SMALLEST[name].get("negative_prompt") == "dark"
        dark = made if is_dark else make(negative_prompt="dark", **guided)
        assert difference(dark, make(negative_prompt="very bright", **guided)) > 0.01
    if name in NEED_IMAGES:
        # Of layers, attention reads little else.
        assert difference(make(images=images_for(name, seed=1)), made) > (
            0.003 if name == "qwen_image_layered" else 0.01
        )
    elif name in (*SEVERAL_IMAGES, "flux", "stable_diffusion_3", "z_image"):
        strength = {"strength": 0.5} if name in IMAGE_TO_IMAGE else {}
        one, other = (make(images=[make_image(seed, 64, 64)], **strength) for seed in (1, 2))
        assert difference(one, other) > 0.01


def assert_equal(made: list[np.ndarray], expected: list[torch.Tensor]) -> None:
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-4)


def test_the_oracle_equals_the_pipeline(tiny_diffusion: Callable[[str], Path]) -> None:
    path, call = tiny_diffusion("z_image"), SMALLEST["z_image"]
    pipe = DiffusionPipeline.from_pretrained(path)
    expected = pipe("a red cat", generator=torch.Generator().manual_seed(3), output_type="np", **call)
    oracle = DiffusersOracle(path)

    assert torch.equal(oracle.generate("a red cat", seed=3, **call), torch.from_numpy(expected.images[0]))
    assert oracle.generate("a red cat", seed=3, output_type="latent", **call).shape == (16, 8, 8)
