# SPDX-License-Identifier: Apache-2.0
"""A tiny `LTX2Pipeline`: text to video of 8k + 1 frames with stereo sound at 24 kHz, denoised by one transformer."""

import string
from pathlib import Path

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

from vllm_omni.testing.tiny.pipelines import IMAGE_STD, LATENT_CHANNELS, VELOCITY_STD, fill_components, run_two_steps
from vllm_omni.testing.tiny.weights import scale_output

SIZES = ("default",)
GAINS = {
    "text_encoder": 1.0, "connectors": 1.5, "transformer": 1.5, "vae": 1.0, "audio_vae": 1.0, "vocoder": 1.0
}  # fmt: skip
WAVE_STD = 0.3
"""Before the vocoder's last activation, which is a hyperbolic tangent."""
TEXT_HIDDEN, TEXT_LAYERS = 64, 2
HEADS, HEAD_DIM, AUDIO_HEAD_DIM = 2, 24, 16
REGISTERS = 16
"""The length of a padded prompt is a multiple of this; 128 in the real model."""
AUDIO_CHANNELS, MEL_BINS = 2, 32
AUDIO_FEATURES = AUDIO_CHANNELS * MEL_BINS // 4
"""Of a frame of sound: its latents, with a quarter of the bins of a spectrum."""


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_gemma_tokenizer()
    pipe = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
            max_image_seq_len=4096, shift_terminal=0.1,
        ),
        vae=AutoencoderKLLTX2Video(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(8, 8, 16, 32),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 4,
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=AUDIO_FEATURES,  # of the latents' statistics, too
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            latent_channels=AUDIO_CHANNELS,
            mel_bins=MEL_BINS,
        ),
        text_encoder=Gemma3ForConditionalGeneration(_text_config(tokenizer)),
        tokenizer=tokenizer,
        connectors=LTX2TextConnectors(
            caption_channels=TEXT_HIDDEN,
            text_proj_in_factor=TEXT_LAYERS + 1,
            video_connector_num_attention_heads=HEADS,
            video_connector_attention_head_dim=TEXT_HIDDEN // HEADS,
            video_connector_num_learnable_registers=REGISTERS,
            audio_connector_num_attention_heads=HEADS,
            audio_connector_attention_head_dim=TEXT_HIDDEN // HEADS,
            audio_connector_num_learnable_registers=REGISTERS,
            rope_type="split",
        ),
        transformer=_make_transformer(),
        vocoder=LTX2Vocoder(in_channels=2 * MEL_BINS, hidden_channels=32),
    )  # fmt: skip
    fill_components(pipe, seed, GAINS)
    for layer, std in (
        (pipe.transformer.proj_out, VELOCITY_STD),
        (pipe.transformer.audio_proj_out, VELOCITY_STD),
        (pipe.vae.decoder.conv_out.conv, IMAGE_STD),
        (pipe.vocoder.conv_out, WAVE_STD),
    ):
        scale_output(layer, std, lambda: run_two_steps(pipe, height=64, width=64, num_frames=9))
    pipe.save_pretrained(path, safe_serialization=True)


def make_gemma_tokenizer() -> GemmaTokenizer:
    """One id for each printable ASCII character, and one for each byte of all others."""
    specials = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.printable[:94]]
    return GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=1024)


def _make_transformer() -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        audio_in_channels=AUDIO_FEATURES,
        audio_out_channels=AUDIO_FEATURES,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=AUDIO_HEAD_DIM,
        audio_cross_attention_dim=HEADS * AUDIO_HEAD_DIM,
        num_layers=2,
        caption_channels=TEXT_HIDDEN,
        rope_type="split",
    )


def _text_config(tokenizer: GemmaTokenizer) -> Gemma3Config:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_HIDDEN,
        "intermediate_size": 2 * TEXT_HIDDEN,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": TEXT_HIDDEN // 16,
        "num_key_value_heads": TEXT_HIDDEN // 32,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, dtype="float32")
