# SPDX-License-Identifier: Apache-2.0
"""A tiny `StableAudioPipeline`: text to stereo sound at 44.1 kHz, at most 0.37 s long.

Its scheduler needs the package `torchsde`.
"""

import math
from pathlib import Path

import torch
from diffusers import AutoencoderOobleck, CosineDPMSolverMultistepScheduler, StableAudioDiTModel, StableAudioPipeline
from diffusers.models.autoencoders.autoencoder_oobleck import OobleckResidualUnit
from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from vllm_omni.testing.tiny.pipelines import VELOCITY_STD, fill_components, run_two_steps
from vllm_omni.testing.tiny.text_encoders import make_t5, make_t5_tokenizer
from vllm_omni.testing.tiny.weights import BRANCH_SCALE, scale_output

LATENT_CHANNELS, NUM_LATENTS = 16, 8
TEXT_HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
SIZES = ("default",)
GAINS = {"text_encoder": 2.0, "projection_model": 1.5, "transformer": 1.5, "vae": 1.0}
WAVE_STD = 0.15
LONGEST_S = 512


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_t5_tokenizer()
    pipe = StableAudioPipeline(
        vae=AutoencoderOobleck(
            encoder_hidden_size=8,
            channel_multiples=[1, 1, 2, 2, 4],
            decoder_channels=8,
            decoder_input_channels=LATENT_CHANNELS,
        ),
        text_encoder=make_t5(tokenizer, TEXT_HIDDEN, 2),
        projection_model=StableAudioProjectionModel(TEXT_HIDDEN, TEXT_HIDDEN, 0, LONGEST_S),
        tokenizer=tokenizer,
        transformer=StableAudioDiTModel(
            sample_size=NUM_LATENTS,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            num_key_value_attention_heads=HEADS // 2,
            cross_attention_dim=HEADS * HEAD_DIM // 2,
            cross_attention_input_dim=TEXT_HIDDEN,
            global_states_input_dim=2 * TEXT_HIDDEN,
        ),
        scheduler=CosineDPMSolverMultistepScheduler(),
    )
    fill_components(pipe, seed, GAINS)
    _scale_branches(pipe.vae)
    scale_output(pipe.transformer.proj_out, VELOCITY_STD, lambda: run_two_steps(pipe))
    wave = run_two_steps(pipe).audios
    with torch.no_grad():  # The last convolution's weight is computed of its norm.
        pipe.vae.decoder.conv2.weight_g *= 2.0 ** round(math.log2(WAVE_STD / wave.std().item()))
    pipe.save_pretrained(path, safe_serialization=True)


@torch.no_grad()
def _scale_branches(vae: AutoencoderOobleck) -> None:
    """Lets the decoder's residual branches add little: else the smallest difference of two latents can be heard."""
    for unit in vae.decoder.modules():
        if isinstance(unit, OobleckResidualUnit):
            unit.conv2.weight_g *= BRANCH_SCALE
