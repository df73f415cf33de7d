# SPDX-License-Identifier: Apache-2.0
"""A tiny CSM: backbone, depth decoder, and Mimi as its codec.

The architecture is the real one, with scaled rotations; only the sizes are small. Codes vary, and greedy speech ends
by itself after some frames: a zero as first code is followed by zeros, and a frame of zeros is the end.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    CsmProcessor,
    EncodecFeatureExtractor,
    MimiModel,
    Qwen2Tokenizer,
)

from vllm_omni.testing.tiny.tokenizer import make_tokenizer, padded_vocab_size, token_id
from vllm_omni.testing.tiny.weights import fill_random, limit_head, scale_output

LAYER_GAIN = 2.0
CODEC_GAIN = 1.2
END_FACTOR = 1.3
"""Scales the first head's row of the code 0: speech ends sooner at larger factors."""
ZERO_EMBEDDING, ZERO_GAIN = 12.0, 6.0
"""Scales of the code 0 in the depth decoder, so that zeros follow a zero."""
WAVE_STD = 0.15
TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|begin_of_text|>[{{ message.role }}]
{%- for part in message.content if part.type == "text" -%}
{{ part.text }}
{%- endfor -%}
<|end_of_text|>
{%- for part in message.content if part.type == "audio" -%}
<|AUDIO|><|audio_eos|>
{%- endfor -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size."""

    hidden: int = 64
    layers: int = 3
    heads: int = 2
    depth_hidden: int = 48
    depth_layers: int = 2
    depth_heads: int = 3
    codebooks: int = 4
    codebook: int = 128
    codec_hidden: int = 32
    codec_layers: int = 2
    codec_filters: int = 4
    codec_window: int = 12


SIZES = {
    "default": Size(),
    "large": Size(
        hidden=384,
        layers=6,
        heads=6,
        depth_hidden=256,
        depth_layers=3,
        depth_heads=4,
        codebooks=8,
        codebook=512,
        codec_hidden=128,
        codec_layers=4,
        codec_filters=16,
        codec_window=50,
    ),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_csm_tokenizer()
    config: Any = make_config(SIZES[size], tokenizer)
    model = CsmForConditionalGeneration(config)
    untie(model)
    fill_random(model, seed, LAYER_GAIN, heads=("lm_head",))
    fill_codec(model.codec_model, seed)
    _shape_outputs(model)
    model.save_pretrained(path)
    extractor = EncodecFeatureExtractor(feature_size=1, sampling_rate=config.codec_config.sampling_rate)
    CsmProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(path)


def make_csm_tokenizer() -> Qwen2Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(size: Size, tokenizer: Qwen2Tokenizer) -> CsmConfig:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    vocab_size = size.codebook + 3  # as in the published one: specials that are no codes
    layers: dict[str, Any] = {"vocab_size": vocab_size, "num_codebooks": size.codebooks}
    config = CsmConfig(
        **layers,
        **_decoder(size.hidden, size.layers, size.heads, max_positions=2048, trained=256),
        text_vocab_size=padded_vocab_size(tokenizer),
        codebook_pad_token_id=vocab_size - 1,
        codebook_eos_token_id=0,
        bos_token_id=token_id(tokenizer, "<|begin_of_text|>"),
        pad_token_id=token_id(tokenizer, "<|AUDIO|>"),
        audio_token_id=token_id(tokenizer, "<|AUDIO|>"),
        audio_eos_token_id=token_id(tokenizer, "<|audio_eos|>"),
        depth_decoder_config={
            **layers,
            **_decoder(size.depth_hidden, size.depth_layers, size.depth_heads, max_positions=33, trained=4),
            "backbone_hidden_size": size.hidden,
        },
        codec_config=codec_config(size),
        tie_codebooks_embeddings=False,
        dtype="float32",
    )
    config.architectures = ["CsmForConditionalGeneration"]
    return config


def _decoder(hidden: int, layers: int, heads: int, max_positions: int, trained: int) -> dict[str, Any]:
    """Llama's fields, with rotations that are scaled from `trained` positions."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % 2 else heads // 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": trained,
        },
    }


def codec_config(size: Size) -> dict[str, Any]:
    """Mimi with its published rates: 24 kHz, 12.5 frames per second."""
    return {
        "model_type": "mimi",
        "hidden_size": size.codec_hidden,
        "intermediate_size": 2 * size.codec_hidden,
        "num_hidden_layers": size.codec_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": size.codec_hidden // 2,
        "num_filters": size.codec_filters,
        "codebook_size": size.codebook,
        "codebook_dim": size.codec_hidden // 2,
        "vector_quantization_hidden_dimension": size.codec_hidden // 2,
        "num_quantizers": size.codebooks,
        "upsample_groups": size.codec_hidden,
        "sliding_window": size.codec_window,
        "upsampling_ratios": [8, 6, 5, 4],
    }


def untie(model: CsmForConditionalGeneration) -> None:
    """transformers 5.19 writes and reads both tables of the codes' embeddings, but ties them in a new model."""
    table: Any = model.backbone_model.embed_tokens.embed_audio_tokens
    table.weight = torch.nn.Parameter(table.weight.detach().clone())


@torch.no_grad()
def fill_codec(codec: MimiModel, seed: int) -> None:
    """Fills a codec, its codebooks included, and keeps its wave in range."""
    fill_random(codec, seed, CODEC_GAIN)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in sorted(codec.named_buffers()):
        if name.endswith("embed_sum"):
            buffer.copy_(torch.empty_like(buffer).normal_(generator=generator))
    codes = torch.arange(16) * torch.arange(1, codec.config.num_quantizers + 1)[:, None]
    last_conv: Any = codec.decoder.layers[-1].conv
    scale_output(last_conv, WAVE_STD, lambda: codec.decode((codes % codec.config.codebook_size)[None]))


@torch.no_grad()
def _shape_outputs(model: CsmForConditionalGeneration) -> None:
    """Limits all heads to codes, and makes speech end: see the top of this file."""
    config: Any = model.config
    codebook, vocab_size = config.codec_config.codebook_size, config.vocab_size
    limit_head(model.lm_head, list(range(codebook)), favoured=0, factor=END_FACTOR)
    depth: Any = model.depth_decoder
    heads = depth.codebooks_head.weight  # [codebooks - 1, hidden, vocab]
    heads *= vocab_size**0.5 * 3 / LAYER_GAIN  # `fill_random` takes them for a convolution
    heads[:, :, codebook:] = 0
    embeddings = depth.model.embed_tokens.weight.view(-1, vocab_size, config.hidden_size)
    embeddings[:, 0] *= ZERO_EMBEDDING
    towards_zero = embeddings[:-1, 0] @ depth.model.inputs_embeds_projector.weight.T  # [codebooks - 1, hidden]
    heads[:, :, 0] = ZERO_GAIN * torch.nn.functional.normalize(towards_zero, dim=-1)
