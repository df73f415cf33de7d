# SPDX-License-Identifier: Apache-2.0
"""A tiny `WanImageToVideoPipeline` of Wan 2.1: an image, also encoded by a CLIP, is the first frame of a video."""

from pathlib import Path

import numpy as np
from diffusers import WanImageToVideoPipeline
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components
from vllm_omni.testing.tiny.wan import GAINS as WAN_GAINS
from vllm_omni.testing.tiny.wan import HEAD_DIM, HEADS, make_components, sharpen_attention

SIZES = ("default",)
GAINS = {**WAN_GAINS, "image_encoder": 1.5}
VISION_HIDDEN = 32
VISION_PIXELS = 32
MASK_CHANNELS = 4
"""They mark the given frames."""


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    components = make_components(
        in_channels=2 * LATENT_CHANNELS + MASK_CHANNELS,
        image_dim=VISION_HIDDEN,
        added_kv_proj_dim=HEADS * HEAD_DIM,
    )
    pipe = WanImageToVideoPipeline(
        **components, image_encoder=_make_image_encoder(), image_processor=_make_image_processor()
    )
    fill_components(pipe, seed, GAINS)
    sharpen_attention(pipe.transformer)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    call = {"image": Image.fromarray(pixels), "height": 64, "width": 64, "num_frames": 5}
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, **call)
    pipe.save_pretrained(path, safe_serialization=True)


def _make_image_encoder() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=VISION_HIDDEN,
        intermediate_size=2 * VISION_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=VISION_PIXELS,
        patch_size=8,
        dtype="float32",
    )
    return CLIPVisionModel(config)


def _make_image_processor() -> CLIPImageProcessor:
    side = {"height": VISION_PIXELS, "width": VISION_PIXELS}
    return CLIPImageProcessor(size=side, crop_size=side, do_center_crop=False)
