# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusers pipelines: outputs depend on their inputs. And their oracle."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.diffusion.tiny_calls import NEED_IMAGES, NEED_PACKAGES, SMALLEST, images_for, make_image
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PROMPT = "a red cat"
# Further arguments that enable classifier-free guidance with a negative prompt, by pipeline.
NEGATIVE: dict[str, dict[str, Any]] = {
    "flux": {"true_cfg_scale": 4.0},
    "hunyuan_video_15": {},
    "kandinsky5": {},
    "longcat_audio_dit": {},
    "ltx2": {},
    "qwen_image": {},
    "qwen_image_edit": {},
    "qwen_image_edit_plus": {},
    "qwen_image_layered": {},
    "stable_audio": {},
    "stable_diffusion_3": {},
    "wan": {},
    "wan_i2v": {},
    "z_image": {},
}


@pytest.fixture(scope="module")
def oracles(tiny_diffusion: Callable[[str], Path]) -> dict[str, DiffusersOracle]:
    installed = [name for name in SMALLEST if importlib.util.find_spec(NEED_PACKAGES.get(name, "torch"))]
    return {name: DiffusersOracle(tiny_diffusion(name)) for name in installed}


@pytest.fixture(scope="module")
def generate(oracles: dict[str, DiffusersOracle]) -> Callable[..., torch.Tensor]:
    def generate(name: str, prompt: str = PROMPT, seed: int = 0, **call: Any) -> torch.Tensor:
        pytest.importorskip(NEED_PACKAGES.get(name, "torch"))
        call = {"images": images_for(name), **SMALLEST[name], **call}
        return oracles[name].generate(prompt, seed=seed, **call)

    return generate


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The difference of two outputs; pixels are between 0 and 1."""
    return (one - other).abs().mean().item()


@pytest.mark.parametrize("name", SMALLEST)
def test_outputs_depend_on_prompt_and_seed(name: str, generate: Callable[..., torch.Tensor]) -> None:
    made = generate(name)

    shape = {
        "ace_step": (2, 19_200),
        "hunyuan_video_15": (5, 64, 64, 3),
        "kandinsky5": (5, 64, 64, 3),
        "longcat_audio_dit": (1, 4 * 2048),
        "ltx2": (9, 64, 64, 3),
        "qwen_image_layered": (2, 544, 736, 4),
        "stable_audio": (2, 13_230),
        "wan": (5, 64, 64, 3),
        "wan_i2v": (5, 64, 64, 3),
    }.get(name, (64, 64, 3))
    assert made.shape == shape
    assert torch.equal(generate(name), made)
    assert difference(generate(name, seed=1), made) > 0.1 * made.std()
    assert difference(generate(name, prompt="the wind in a tree at night"), made) > 0.1 * made.std()
    if name not in ("ace_step", "longcat_audio_dit", "stable_audio"):
        assert made.std() > 0.1
        assert ((made == 0) | (made == 1)).float().mean() < 0.1


@pytest.mark.parametrize("name", NEGATIVE)
def test_outputs_depend_on_the_negative_prompt(name: str, generate: Callable[..., torch.Tensor]) -> None:
    dark, bright = (generate(name, negative_prompt=word, **NEGATIVE[name]) for word in ("dark", "very bright"))

    assert difference(dark, bright) > 0.01


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "stable_diffusion_3", "z_image", *NEED_IMAGES])
def test_outputs_depend_on_input_images(name: str, generate: Callable[..., torch.Tensor]) -> None:
    strength = {"strength": 0.5} if name in ("flux", "stable_diffusion_3", "z_image") else {}
    mode = images_for(name)[0].mode if images_for(name) else "RGB"
    one, other = (generate(name, images=[make_image(seed, 64, 64).convert(mode)], **strength) for seed in (1, 2))

    # Most of what attention reads are layers.
    assert difference(one, other) > (0.003 if name == "qwen_image_layered" else 0.01)


def test_several_input_images(generate: Callable[..., torch.Tensor]) -> None:
    images = [make_image(seed, 64, 64) for seed in (1, 2)]

    assert difference(generate("flux2_klein", images=images), generate("flux2_klein", images=images[:1])) > 0.01


def test_the_oracle_equals_the_pipeline(tiny_diffusion: Callable[[str], Path]) -> None:
    path = tiny_diffusion("z_image")
    pipe = DiffusionPipeline.from_pretrained(path)
    expected = pipe(PROMPT, generator=torch.Generator().manual_seed(3), output_type="np", **SMALLEST["z_image"])
    oracle = DiffusersOracle(path)

    assert torch.equal(oracle.generate(PROMPT, seed=3, **SMALLEST["z_image"]), torch.from_numpy(expected.images[0]))
    latents = oracle.generate(PROMPT, seed=3, output_type="latent", **SMALLEST["z_image"])
    assert latents.shape == (16, 8, 8)


@pytest.mark.parametrize("name", ["z_image", "flux", "stable_diffusion_3", "qwen_image"])
def test_the_large_size_is_large(name: str, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(name, tmp_path, size="large")

    assert 20e6 < (path / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size < 100e6
