# SPDX-License-Identifier: Apache-2.0
"""A tiny `LongCatAudioDiTPipeline`: text to speech and sound, mono at 24 kHz."""

import math
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
)

from vllm_omni.testing.tiny.pipelines import VELOCITY_STD, fill_components, run_two_steps
from vllm_omni.testing.tiny.text_encoders import make_t5_tokenizer, make_umt5
from vllm_omni.testing.tiny.weights import scale_output

LATENT_CHANNELS, TEXT_HIDDEN, HIDDEN, HEADS = 16, 64, 64, 4
SIZES = ("default",)
GAINS = {"text_encoder": 2.0, "transformer": 1.5, "vae": 1.0}
WAVE_STD = 0.15
STRIDES = [2, 4, 4, 8, 8]
"""Of the vocoder: 2048 samples a latent, as in the real one."""


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_t5_tokenizer()
    pipe = LongCatAudioDiTPipeline(
        vae=LongCatAudioDiTVae(
            channels=4,
            c_mults=[1, 2, 2, 4, 4],
            strides=STRIDES,
            latent_dim=LATENT_CHANNELS,
            encoder_latent_dim=2 * LATENT_CHANNELS,
        ),
        text_encoder=make_umt5(tokenizer, TEXT_HIDDEN, 2),
        tokenizer=tokenizer,
        transformer=LongCatAudioDiTTransformer(
            dit_dim=HIDDEN, dit_depth=2, dit_heads=HEADS, dit_text_dim=TEXT_HIDDEN, latent_dim=LATENT_CHANNELS
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True),
    )
    fill_components(pipe, seed, GAINS)
    scale_output(pipe.transformer.proj_out, VELOCITY_STD, lambda: run_two_steps(pipe, audio_duration_s=0.4))
    wave = run_two_steps(pipe, audio_duration_s=0.4).audios
    with torch.no_grad():  # The last convolution's weight is computed of its norm.
        pipe.vae.decoder.layers[-2].weight_g *= 2.0 ** round(math.log2(WAVE_STD / wave.std().item()))
    pipe.save_pretrained(path, safe_serialization=True)
