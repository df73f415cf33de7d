# SPDX-License-Identifier: Apache-2.0
"""A tiny `FluxPipeline`, guidance embedded as in FLUX.1-dev: pooled CLIP output and T5 tokens of the prompt."""

from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, Size, calibrate, fill_components, make_image_vae
from vllm_omni.testing.tiny.text_encoders import clip_config, make_clip_tokenizer, make_t5, make_t5_tokenizer

SIZES = {
    "default": Size(layers=2, heads=4, axes=(4, 6, 6), text_hidden=64, text_layers=2),
    "large": Size(layers=2, heads=5, axes=(16, 24, 24), text_hidden=128, text_layers=3),
}
GAINS = {"text_encoder": 1.5, "text_encoder_2": 1.5, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = _build(SIZES[size])
    fill_components(pipe, seed, GAINS)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64)
    pipe.save_pretrained(path, safe_serialization=True)


def _build(size: Size) -> FluxPipeline:
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,  # 2 x 2 latents are one token
        num_layers=size.layers,
        num_single_layers=size.layers,
        attention_head_dim=sum(size.axes),
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_hidden,
        pooled_projection_dim=size.text_hidden,
        guidance_embeds=True,
        axes_dims_rope=size.axes,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=make_image_vae(),
        text_encoder=CLIPTextModel(clip_config(clip_tokenizer, size.text_hidden, size.text_layers)),
        tokenizer=clip_tokenizer,
        text_encoder_2=make_t5(t5_tokenizer, size.text_hidden, size.text_layers),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )
