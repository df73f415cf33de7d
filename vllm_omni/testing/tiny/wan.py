# SPDX-License-Identifier: Apache-2.0
"""A tiny `WanPipeline`: text to video of 4k + 1 frames, 8 pixels and 4 frames a latent. Shared with `wan_i2v`."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components
from vllm_omni.testing.tiny.text_encoders import make_t5_tokenizer, make_umt5

HEADS, HEAD_DIM = 2, 24
TEXT_HIDDEN = 64
SIZES = ("default",)
GAINS = {"text_encoder": 1.5, "transformer": 1.5, "vae": 1.0}
QUERY_GAIN = 4.0


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = WanPipeline(**make_components())
    fill_components(pipe, seed, GAINS)
    sharpen_attention(pipe.transformer)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64, num_frames=5)
    pipe.save_pretrained(path, safe_serialization=True)


def make_components(**transformer_settings: Any) -> dict[str, Any]:
    """Arguments of the pipeline's class.

    Args:
        transformer_settings: For a transformer with inputs besides noise and text.
    """
    tokenizer = make_t5_tokenizer()
    settings = {"in_channels": LATENT_CHANNELS, **transformer_settings}
    transformer = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_HIDDEN,
        ffn_dim=2 * HEADS * HEAD_DIM,
        num_layers=2,
        **settings,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": make_umt5(tokenizer, TEXT_HIDDEN, 2),
        "vae": AutoencoderKLWan(base_dim=4, num_res_blocks=1),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
        ),
        "transformer": transformer,
    }


def sharpen_attention(transformer: WanTransformer3DModel) -> None:
    """Makes cross-attention select few tokens: the pipeline pads each prompt to 512 tokens, without a mask."""
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn2.norm_q.weight *= QUERY_GAIN
