# SPDX-License-Identifier: Apache-2.0
"""A tiny `Flux2KleinPipeline`: text, or text and images, to image.

The text encoder has 28 narrow layers: the pipeline uses the states after layers 9, 18 and 27.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from transformers import Qwen3ForCausalLM

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer, qwen3_config

TEXT_LAYERS = 28
LAYERS_READ = 3


AXES = (4, 4, 4, 4)
"""Parts of a head with position information."""
TEXT_HIDDEN = 32
SIZES = ("default",)
GAINS = {"text_encoder": 1.0, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = _build()
    fill_components(pipe, seed, GAINS)
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64)
    pipe.save_pretrained(path, safe_serialization=True)


def _build() -> Flux2KleinPipeline:
    tokenizer = make_qwen_tokenizer()
    transformer = Flux2Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,  # 2 x 2 latents are one token
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=sum(AXES),
        num_attention_heads=4,
        joint_attention_dim=LAYERS_READ * TEXT_HIDDEN,
        axes_dims_rope=AXES,
        guidance_embeds=False,
    )
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_make_vae(),
        text_encoder=Qwen3ForCausalLM(qwen3_config(tokenizer, TEXT_HIDDEN, TEXT_LAYERS)),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _make_vae() -> AutoencoderKLFlux2:
    """Normalizes its latents by statistics other than 0 and 1, so that leaving them out changes the output."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16), layers_per_block=1, latent_channels=LATENT_CHANNELS, norm_num_groups=4
    )
    with torch.no_grad():
        vae.bn.running_mean.fill_(0.1)
        vae.bn.running_var.fill_(2.0)
    return vae
