# SPDX-License-Identifier: Apache-2.0
"""A tiny `QwenImageLayeredPipeline`: an image to its layers, images with transparency.

Its images have about 640 x 640 pixels: its autoencoder is that of `qwen_image_edit`, with an alpha channel.
"""

from pathlib import Path

from diffusers import AutoencoderKLQwenImage, QwenImageLayeredPipeline

from vllm_omni.testing.tiny.qwen_image import make_components
from vllm_omni.testing.tiny.qwen_image_edit import SIZES, VAE, fill_and_save, make_noise, make_processor

__all__ = ["SIZES", "write"]

LATENTS_GAIN = 16.0


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    components = make_components(SIZES[size], use_additional_t_cond=True, use_layer3d_rope=True)
    components["vae"] = AutoencoderKLQwenImage(**VAE, input_channels=4)
    pipe = QwenImageLayeredPipeline(**components, processor=make_processor(components["tokenizer"]))
    fill_and_save(pipe, path, seed, {"image": make_noise(4), "negative_prompt": "dark", "layers": 2}, LATENTS_GAIN)
