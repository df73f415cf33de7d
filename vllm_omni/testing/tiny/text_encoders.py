# SPDX-License-Identifier: Apache-2.0
"""Tiny text encoders of diffusers pipelines, with tokenizers made without any download.

`pipelines.py` overwrites the weights.
"""

import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from vllm_omni.testing.tiny.tokenizer import QWEN3, make_tokenizer, padded_vocab_size

MAX_POSITIONS = 4096
CLIP_POSITIONS = 77


def make_qwen_tokenizer() -> Qwen2Tokenizer:
    """The byte-level tokenizer of our tiny Qwen models. `apply_chat_template` accepts diffusers' messages."""
    return make_tokenizer(QWEN3)


def qwen3_config(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> Qwen3Config:
    """Heads of 16; twice as many for queries as for keys and values."""
    return Qwen3Config(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        dtype="float32",
    )


def make_clip_tokenizer() -> CLIPTokenizer:
    """Encodes byte by byte; a word's last byte has its own id, as in the real one. Lower case only."""
    symbols = sorted(ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=CLIP_POSITIONS)


def clip_config(tokenizer: CLIPTokenizer, hidden: int, layers: int) -> CLIPTextConfig:
    """Heads of 16. The pooled output is that of the end token."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        max_position_embeddings=CLIP_POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_t5_tokenizer() -> T5Tokenizer:
    """One id for each printable ASCII character; all others are unknown tokens."""
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *characters]  # the fourth stands for the space before a word
    vocab = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def make_t5(tokenizer: T5Tokenizer, hidden: int, layers: int) -> T5EncoderModel:
    """The encoder of T5 1.1."""
    return T5EncoderModel(T5Config(**_t5_settings(tokenizer, hidden, layers)))


def make_umt5(tokenizer: T5Tokenizer, hidden: int, layers: int) -> UMT5EncoderModel:
    """The encoder of UMT5, each of whose layers has its own position biases."""
    return UMT5EncoderModel(UMT5Config(**_t5_settings(tokenizer, hidden, layers)))


def _t5_settings(tokenizer: T5Tokenizer, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": hidden,
        "d_kv": 16,
        "d_ff": 2 * hidden,
        "num_layers": layers,
        "num_heads": hidden // 16,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
