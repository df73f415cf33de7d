# SPDX-License-Identifier: Apache-2.0
"""A tiny Higgs Audio v2, with its codec in a folder of the checkpoint.

The architecture is the real one, with scaled rotations, the published rates and as many ids behind the codes; only the
sizes are small. Codes vary, and greedy speech ends by itself: any codebook can sample its end.
"""

import importlib
import math
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    DacFeatureExtractor,
    GenerationConfig,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerConfig,
    Qwen2Tokenizer,
)

from vllm_omni.testing.tiny.tokenizer import make_tokenizer, padded_vocab_size, token_id
from vllm_omni.testing.tiny.weights import fill_random, scale_output

CODEC = "bosonai/higgs-audio-v2-tokenizer"
"""The codec's folder, named as its published checkpoint."""

LAYER_GAIN = 2.0
CODEC_GAIN = 1.2
END_FACTOR = 0.9
"""Scales the heads' rows of the end: speech ends sooner at larger factors."""
WAVE_STD = 0.15
NUM_SPECIALS = 2
"""Ids behind the codes: start and end."""
RATIOS = [8, 5, 4, 2, 3]
"""Of the published codec: 24 kHz, 25 frames per second."""
TOKENS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|scene_desc_start|>", "<|scene_desc_end|>"),
    *("<|audio_out_bos|>", "<|AUDIO_OUT|>", "<|audio_eos|>", "<|reserved_special_token_6|>"),
)
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "scene" -%}
<|scene_desc_start|>
{% else -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% endif -%}
{%- for part in message.content -%}
{%- if part.type == "audio" -%}
<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>
{%- else -%}
{{ part.text | trim }}
{%- endif -%}
{%- endfor -%}
{%- if message.role == "scene" %}
<|scene_desc_end|>
{%- endif -%}
{%- if message.role != "system" -%}
<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

<|audio_out_bos|>
{%- endif -%}
"""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size."""

    hidden: int = 64
    layers: int = 3
    heads: int = 2
    codebooks: int = 4
    codebook: int = 64
    codec_hidden: int = 16
    codec_channels: int = 64
    semantic_layers: int = 2


SIZES = {
    "default": Size(),
    "large": Size(
        hidden=384,
        layers=6,
        heads=6,
        codebooks=8,
        codebook=256,
        codec_hidden=64,
        codec_channels=256,
        semantic_layers=4,
    ),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_higgs_tokenizer()
    config: Any = make_config(SIZES[size], tokenizer)
    model = HiggsAudioV2ForConditionalGeneration(config)
    fill_random(model, seed, LAYER_GAIN, heads=("audio_lm_head",))
    _shape_heads(model.audio_lm_head, config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(path)
    codec = import_codec()(make_codec_config(SIZES[size]))
    fill_codec(codec, seed)
    codec.save_pretrained(path / CODEC)
    DacFeatureExtractor(sampling_rate=24000, hop_length=1).save_pretrained(path / CODEC)
    tokenizer.save_pretrained(path)


@torch.no_grad()
def _shape_heads(heads: torch.nn.Linear, config: HiggsAudioV2Config) -> None:
    """No codebook samples its start; each can sample its end."""
    rows = heads.weight.view(config.num_codebooks, config.codebook_size, -1)
    rows[:, config.audio_stream_bos_id] = 0
    rows[:, config.audio_stream_eos_id] *= END_FACTOR


def make_higgs_tokenizer() -> Qwen2Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(size: Size, tokenizer: Qwen2Tokenizer) -> HiggsAudioV2Config:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    config = HiggsAudioV2Config(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.hidden // size.heads,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 0.125,
            "high_freq_factor": 0.5,
            "original_max_position_embeddings": 256,
        },
        num_codebooks=size.codebooks,
        codebook_size=size.codebook + NUM_SPECIALS,
        audio_stream_bos_id=size.codebook,
        audio_stream_eos_id=size.codebook + 1,
        bos_token_id=token_id(tokenizer, "<|begin_of_text|>"),
        eos_token_id=token_id(tokenizer, "<|eot_id|>"),
        pad_token_id=token_id(tokenizer, "<|endoftext|>"),
        audio_token_id=token_id(tokenizer, "<|AUDIO_OUT|>"),
        audio_bos_token_id=token_id(tokenizer, "<|audio_out_bos|>"),
        audio_delay_token_id=token_id(tokenizer, "<|reserved_special_token_6|>"),
        dtype="float32",
    )
    config.architectures = ["HiggsAudioV2ForConditionalGeneration"]
    return config


def make_codec_config(size: Size) -> HiggsAudioV2TokenizerConfig:
    bits = (size.codebook - 1).bit_length()
    return HiggsAudioV2TokenizerConfig(
        target_bandwidths=[25 * bits * size.codebooks / 1000],
        codebook_size=size.codebook,
        codebook_dim=size.codec_hidden // 2,
        acoustic_model_config={
            "model_type": "dac",
            "encoder_hidden_size": 4,
            "downsampling_ratios": RATIOS,
            "decoder_hidden_size": size.codec_channels,
            "upsampling_ratios": RATIOS,
            "hidden_size": size.codec_hidden,
        },
        semantic_model_config={
            "model_type": "hubert",
            "hidden_size": size.codec_hidden,
            "intermediate_size": 2 * size.codec_hidden,
            "num_hidden_layers": size.semantic_layers,
            "num_attention_heads": 2,
            "conv_dim": [size.codec_hidden] * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        dtype="float32",
    )


def import_codec() -> Any:
    """HF's class of the codec, which imports torchaudio for one function: where it is not installed, that is ours."""
    path = "transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer"
    if find_spec("torchaudio") is None and path not in sys.modules:
        stub: Any = ModuleType("torchaudio")
        stub.functional = SimpleNamespace(resample=_resample)
        sys.modules["torchaudio"] = stub
        importlib.import_module(path)
        del sys.modules["torchaudio"]  # Other libraries look for it.
    return importlib.import_module(path).HiggsAudioV2TokenizerModel


def _resample(sound: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
    """`[1, 1, samples]` at another rate: sums of samples around each new one, weighted by a sinc in a Hann window."""
    size = sound.shape[-1]
    cutoff = 0.99 * min(rate, new_rate) / rate
    reach = math.ceil(6 / cutoff)
    centers = torch.arange(math.ceil(size * new_rate / rate), dtype=torch.float64)[:, None] * rate / new_rate
    indices = centers.floor() + torch.arange(-reach, reach + 2)  # [new samples, those around each]
    time = ((indices - centers) * cutoff).clamp(-6, 6)
    weights = cutoff * torch.sinc(time) * torch.cos(time * math.pi / 12) ** 2
    padded = torch.nn.functional.pad(sound[0, 0], (reach, reach + 2))
    return (padded[indices.long() + reach] * weights.float()).sum(-1)[None, None]


@torch.no_grad()
def fill_codec(codec: Any, seed: int) -> None:
    """Fills the codec, its codebooks included, and keeps its wave in range."""
    fill_random(codec, seed, CODEC_GAIN)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(codec.named_parameters()):
        if name.endswith("alpha"):
            parameter.copy_(1 + 0.1 * torch.empty_like(parameter).normal_(generator=generator))
    for name, buffer in sorted(codec.named_buffers()):
        if name.endswith("embed"):
            buffer.copy_(torch.empty_like(buffer).normal_(generator=generator))
    config: Any = codec.config
    codes = torch.arange(16) * torch.arange(1, config.num_quantizers + 1)[:, None] % config.codebook_size
    scale_output(codec.acoustic_decoder.conv2, WAVE_STD, lambda: codec.decode(codes[None]))
