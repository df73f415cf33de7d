# SPDX-License-Identifier: Apache-2.0
"""The arguments of the tiny pipelines in tests: the smallest output of each, and an image for those that need one."""

from typing import Any

import numpy as np
from PIL import Image

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}
SMALL_VIDEO = {**SMALL, "num_frames": 5}
SMALLEST: dict[str, dict[str, Any]] = {
    "ace_step": {"num_inference_steps": 2, "audio_duration": 0.4},
    "flux": SMALL,
    "flux2_klein": {**SMALL, "max_sequence_length": 64},  # its text encoder is deep
    "hunyuan_video_15": SMALL_VIDEO,
    "kandinsky5": SMALL_VIDEO,
    "longcat_audio_dit": {"num_inference_steps": 2, "audio_duration_s": 0.4},
    "ltx2": {**SMALL, "num_frames": 9, "stg_scale": 0.0, "audio_stg_scale": 0.0, "max_sequence_length": 64},
    "qwen_image": {**SMALL, "negative_prompt": "dark"},
    "qwen_image_edit": {**SMALL, "negative_prompt": "dark"},
    "qwen_image_edit_plus": {**SMALL, "negative_prompt": "dark"},
    "qwen_image_layered": {"num_inference_steps": 2, "layers": 2, "negative_prompt": "dark"},
    "stable_audio": {"num_inference_steps": 2, "audio_end_in_s": 0.3},
    "stable_diffusion_3": SMALL,
    "wan": SMALL_VIDEO,
    "wan_i2v": SMALL_VIDEO,
    "z_image": SMALL,
}
"""Name of a tiny pipeline -> arguments of its diffusers pipeline, besides the prompt."""

NEED_IMAGES = ("qwen_image_edit", "qwen_image_edit_plus", "qwen_image_layered", "wan_i2v")
NEED_PACKAGES = {"stable_audio": "torchsde"}
"""Name of a tiny pipeline -> the package that it needs and that few others do."""


def make_image(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Large random patches: they survive being resized."""
    patches = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.NEAREST)


def images_for(name: str, seed: int = 0) -> list[Image.Image]:
    """Input images of a call of this pipeline."""
    if name == "qwen_image_layered":  # diffusers fails with an image that has no transparency
        return [make_image(seed).convert("RGBA")]
    return [make_image(seed)] if name in NEED_IMAGES else []
