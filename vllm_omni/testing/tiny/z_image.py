# SPDX-License-Identifier: Apache-2.0
"""A tiny `ZImagePipeline`: text to image, and image to image with diffusers' `ZImageImg2ImgPipeline`."""

from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, Size, calibrate, fill_components, make_image_vae
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer, qwen3_config

SIZES = {
    "default": Size(layers=2, heads=4, axes=(4, 6, 6), text_hidden=64, text_layers=3),
    "large": Size(layers=4, heads=6, axes=(16, 24, 24), text_hidden=128, text_layers=4),
}
GAINS = {"text_encoder": 2.0, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = _build(SIZES[size])
    fill_components(pipe, seed, GAINS)
    calibrate(pipe, pipe.transformer.all_final_layer["2-1"].linear, pipe.vae.decoder.conv_out, height=64, width=64)
    pipe.save_pretrained(path, safe_serialization=True)


def _build(size: Size) -> ZImagePipeline:
    tokenizer = make_qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=size.heads * sum(size.axes),
        n_layers=size.layers,
        n_refiner_layers=1,
        n_heads=size.heads,
        n_kv_heads=size.heads,
        cap_feat_dim=size.text_hidden,
        axes_dims=list(size.axes),
        axes_lens=[1024, 512, 512],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_image_vae(),
        text_encoder=Qwen3Model(qwen3_config(tokenizer, size.text_hidden, size.text_layers)),
        tokenizer=tokenizer,
        transformer=transformer,
    )
