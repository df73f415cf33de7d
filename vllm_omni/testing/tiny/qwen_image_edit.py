# SPDX-License-Identifier: Apache-2.0
"""A tiny `QwenImageEditPipeline`: an image and an instruction to another image. Shared with `qwen_image_edit_plus`.

The pipeline scales every input to a million pixels. Its autoencoder therefore has 16 pixels a latent on each side, not
8 as the real one: sizes are multiples of 32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

from vllm_omni.testing.tiny.pipelines import Size, calibrate, fill_components
from vllm_omni.testing.tiny.qwen_image import GAINS, PATCH, add_template_tokens, make_components

SIZES = {"default": Size(layers=2, heads=4, axes=(4, 6, 6), text_hidden=64, text_layers=2)}
VAE = {"base_dim": 8, "dim_mult": [1] * 5, "num_res_blocks": 0, "temperal_downsample": [False, False, True, True]}
"""Only the encoder's first layer and the one that halves the size run at full size."""
PROMPT_KEYS_GAIN = 3.0


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    write_pipeline(QwenImageEditPipeline, path, seed, size)


def write_pipeline(pipeline_class: Any, path: Path, seed: int, size: str) -> None:
    """Writes a pipeline of this class or of another one of the same components."""
    components = make_components(SIZES[size])
    components["vae"] = AutoencoderKLQwenImage(**VAE)
    pipe = pipeline_class(**components, processor=make_processor(components["tokenizer"]))
    call = {"image": make_noise(3), "negative_prompt": "dark", "height": 64, "width": 64}
    fill_and_save(pipe, path, seed, call)


def make_noise(channels: int) -> Image.Image:
    """An image of 64 x 64 random pixels."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, channels), np.uint8))


def fill_and_save(pipe: Any, path: Path, seed: int, call: dict[str, Any], latents_gain: float = 1.0) -> None:
    """
    Args:
        call: Arguments of the pipeline besides the prompt.
        latents_gain: How much more the latents of two images differ.
    """
    add_template_tokens(pipe.tokenizer, pipe.prompt_template_encode)
    fill_components(pipe, seed, GAINS)
    with torch.no_grad():
        pipe.vae.encoder.conv_out.weight *= latents_gain
    _sharpen_attention(pipe)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, **call)
    pipe.save_pretrained(path, safe_serialization=True)


def _sharpen_attention(pipe: Any) -> None:
    """Makes attention prefer the few tokens of the prompt to the thousand of the image."""
    with torch.no_grad():
        for block in pipe.transformer.transformer_blocks:
            block.attn.norm_added_k.weight *= PROMPT_KEYS_GAIN


def make_processor(tokenizer: object) -> Qwen2VLProcessor:
    """Gives the text encoder at most 16 tokens of an image."""
    pixels = {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 16 * (2 * PATCH) ** 2}
    settings = {"size": pixels, "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    images, videos = Qwen2VLImageProcessor(**settings), Qwen2VLVideoProcessor(**settings)
    return Qwen2VLProcessor(images, tokenizer, videos)
