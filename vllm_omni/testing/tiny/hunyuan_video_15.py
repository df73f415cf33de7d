# SPDX-License-Identifier: Apache-2.0
"""A tiny `HunyuanVideo15Pipeline`: text to video of 4k + 1 frames, 16 pixels and 4 frames a latent."""

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel

from vllm_omni.testing.tiny.pipelines import calibrate, fill_components
from vllm_omni.testing.tiny.qwen_image import add_template_tokens, qwen2_5_vl_config
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer, make_t5

LATENT_CHANNELS = 16
TEXT_HIDDEN, TEXT_LAYERS = 64, 4
"""The pipeline reads the states two layers before the last."""
GLYPH_HIDDEN, IMAGE_DIM = 64, 16
SIZES = ("default",)
GAINS = {"text_encoder": 2.0, "text_encoder_2": 2.0, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_qwen_tokenizer()
    glyph_tokenizer: Any = ByT5Tokenizer()
    text_config: Any = qwen2_5_vl_config(tokenizer, TEXT_HIDDEN, TEXT_LAYERS).text_config
    pipe = HunyuanVideo15Pipeline(
        text_encoder=Qwen2_5_VLTextModel(text_config),
        tokenizer=tokenizer,
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=2 * LATENT_CHANNELS + 1,  # also those of a first frame, and where it is
            out_channels=LATENT_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=TEXT_HIDDEN,
            text_embed_2_dim=GLYPH_HIDDEN,
            image_embed_dim=IMAGE_DIM,
            rope_axes_dim=(4, 6, 6),
            task_type="t2v",
        ),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=LATENT_CHANNELS, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=make_t5(glyph_tokenizer, GLYPH_HIDDEN, 2),
        tokenizer_2=glyph_tokenizer,
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    add_template_tokens(tokenizer, pipe.system_message)
    fill_components(pipe, seed, GAINS)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out.conv, height=64, width=64, num_frames=5)
    pipe.save_pretrained(path, safe_serialization=True)
