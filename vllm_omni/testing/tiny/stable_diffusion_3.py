# SPDX-License-Identifier: Apache-2.0
"""A tiny `StableDiffusion3Pipeline`: two CLIPs and a T5 encode the prompt.

The T5 is required: diffusers 0.42 saves a pipeline without it, but cannot load that.
"""

from dataclasses import dataclass
from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components, make_image_vae
from vllm_omni.testing.tiny.text_encoders import clip_config, make_clip_tokenizer, make_t5, make_t5_tokenizer


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ. The CLIPs together are at most as wide as the T5."""

    layers: int
    heads: int
    head_dim: int
    clip_hidden: int
    t5_hidden: int
    text_layers: int


SIZES = {
    "default": Size(layers=2, heads=4, head_dim=16, clip_hidden=32, t5_hidden=64, text_layers=3),
    "large": Size(layers=4, heads=5, head_dim=64, clip_hidden=64, t5_hidden=128, text_layers=3),
}
GAINS = {"text_encoder": 1.5, "text_encoder_2": 1.5, "text_encoder_3": 1.5, "transformer": 0.7, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = _build(SIZES[size])
    fill_components(pipe, seed, GAINS)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64)
    pipe.save_pretrained(path, safe_serialization=True)


def _build(size: Size) -> StableDiffusion3Pipeline:
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    clip = clip_config(clip_tokenizer, size.clip_hidden, size.text_layers)
    transformer = SD3Transformer2DModel(
        in_channels=LATENT_CHANNELS,
        num_layers=size.layers,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=size.t5_hidden,
        caption_projection_dim=size.heads * size.head_dim,
        pooled_projection_dim=2 * size.clip_hidden,
        out_channels=LATENT_CHANNELS,
        pos_embed_max_size=64,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_image_vae(),
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=clip_tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=make_t5(t5_tokenizer, size.t5_hidden, size.text_layers),
        tokenizer_3=t5_tokenizer,
    )
