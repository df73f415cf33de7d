# SPDX-License-Identifier: Apache-2.0
"""A tiny `AceStepPipeline`: text and lyrics to stereo sound at 48 kHz, 25 latents a second as in ACE-Step 1.5."""

from pathlib import Path

import torch
from diffusers import AceStepPipeline, AceStepTransformer1DModel, AutoencoderOobleck, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step import AceStepConditionEncoder
from transformers import Qwen3Model

from vllm_omni.testing.tiny.pipelines import VELOCITY_STD, fill_components, run_two_steps
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer, qwen3_config
from vllm_omni.testing.tiny.weights import scale_output

LATENT_CHANNELS = 16
SAMPLE_RATE = 48_000


HEADS, HEAD_DIM = 4, 16
TEXT_HIDDEN = 64
SIZES = ("default",)
GAINS = {"text_encoder": 2.0, "condition_encoder": 1.5, "transformer": 1.5, "vae": 1.0}
VAE_NORM = 0.7
"""Approximate norm of filters. At 1 the signal grows from layer to layer, and rounding errors with it."""


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = _build()
    fill_components(pipe, seed, GAINS)
    _scale_filters(pipe.vae)
    silence = pipe.condition_encoder.silence_latent
    silence.normal_(generator=torch.Generator().manual_seed(seed))
    # The pipeline itself normalizes the loudness of the decoded sound.
    scale_output(pipe.transformer.proj_out_conv, VELOCITY_STD, lambda: run_two_steps(pipe, audio_duration=0.4))
    pipe.save_pretrained(path, safe_serialization=True)


def _build() -> AceStepPipeline:
    tokenizer = make_qwen_tokenizer()
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "head_dim": HEAD_DIM}
    widths = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 2 * HEADS * HEAD_DIM}
    transformer = AceStepTransformer1DModel(
        num_hidden_layers=2,
        in_channels=3 * LATENT_CHANNELS,  # noise, given sound, and its mask
        audio_acoustic_hidden_dim=LATENT_CHANNELS,
        encoder_hidden_size=HEADS * HEAD_DIM,
        **widths,
        **heads,
    )
    condition_encoder = AceStepConditionEncoder(
        text_hidden_dim=TEXT_HIDDEN,
        timbre_hidden_dim=LATENT_CHANNELS,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        **widths,
        **heads,
    )
    return AceStepPipeline(
        vae=_make_vae(),
        text_encoder=Qwen3Model(qwen3_config(tokenizer, TEXT_HIDDEN, 2)),
        tokenizer=tokenizer,
        transformer=transformer,
        condition_encoder=condition_encoder,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


def _make_vae() -> AutoencoderOobleck:
    return AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 4, 4, 6, 10],
        channel_multiples=[1, 2, 2, 4, 4],
        decoder_channels=4,
        decoder_input_channels=LATENT_CHANNELS,
        audio_channels=2,
        sampling_rate=SAMPLE_RATE,
    )


def _scale_filters(vae: AutoencoderOobleck) -> None:
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.endswith("weight_g"):
                parameter *= VAE_NORM
