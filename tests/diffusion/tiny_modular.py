# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of modular pipelines, made of the tiny pipelines with the same components."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

from tests.diffusion.tiny_calls import SMALL, SMALL_VIDEO, make_image
from tests.diffusion.tiny_pipelines import build

SHORT = {**SMALL, "max_sequence_length": 64}
IMAGE = {"image": make_image(0, 64, 64)}
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "flux": ("flux", {}, SMALL),
    "flux, image": ("flux", IMAGE, {**SMALL, "num_inference_steps": 3, "strength": 0.7}),
    "flux2_klein": ("flux2_klein", {}, SHORT),
    "flux2_klein, images": ("flux2_klein", {"image": [make_image(0, 64, 64), make_image(1, 96, 64)]}, SHORT),
    "hunyuan_video_15": ("hunyuan_video_15", {}, SMALL_VIDEO),
    "ltx2": ("ltx2", {}, {**SHORT, "num_frames": 9}),
    "qwen_image": ("qwen_image", {}, {**SMALL, "negative_prompt": "dark"}),
    "qwen_image_edit": ("qwen_image_edit", IMAGE, {**SMALL, "negative_prompt": "dark"}),
    "stable_diffusion_3": ("stable_diffusion_3", {}, SMALL),
    "stable_diffusion_xl": ("StableDiffusionXLPipeline", {}, SMALL),
    "wan": ("wan", {}, SMALL_VIDEO),
    "wan, image": ("wan_i2v", IMAGE, SMALL_VIDEO),
    "z_image": ("z_image", {}, SHORT),
    "z_image, image": ("z_image", IMAGE, {**SHORT, "num_inference_steps": 3, "strength": 0.7}),
}
"""Checkpoint and workflow -> the tiny pipeline with the same components, media, and other inputs."""


def write_modular(name: str, folder: Path, tiny_diffusion: Callable[[str], Path]) -> None:
    """Writes the checkpoint of the modular pipeline for a tiny pipeline's components."""
    if hasattr(diffusers, name):
        source = folder.with_name(f"{folder.name}_source")
        build(name).save_pretrained(source)
    else:
        source = tiny_diffusion(name)
    pipe = ModularPipeline.from_pretrained(str(source))
    pipe.load_components(dtype=torch.float32)
    pipe.save_pretrained(str(folder))


class BareModular:
    """Diffusers alone."""

    def __init__(self, folder: Path) -> None:
        self.pipe: Any = ModularPipeline.from_pretrained(str(folder))
        self.pipe.load_components(dtype=torch.float32)
        _hide_progress(self.pipe._blocks)

    def __call__(self, prompt: str, seed: int, output: str | list[str], **inputs: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        output_type = {} if output == "latents" else {"output_type": "np"}
        return self.pipe(prompt=prompt, generator=generator, output=output, **output_type, **inputs)


def _hide_progress(block: Any) -> None:
    if isinstance(block, LoopSequentialPipelineBlocks) or hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in block.sub_blocks.values():
        _hide_progress(inner)
