# SPDX-License-Identifier: Apache-2.0
"""A tiny `Qwen3ForCausalLM`: text in, text out. Used by the engine tests and the benchmark against plain vLLM."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm_omni.testing.tiny.tokenizer import (
    answer_token_ids,
    generation_config,
    make_tokenizer,
    padded_vocab_size,
    save_tokenizer,
    token_id,
)
from vllm_omni.testing.tiny.weights import fill_random, limit_head

SIZES: dict[str, dict[str, Any]] = {
    "default": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "large": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
LAYER_GAIN = 2.0
EOS_FACTOR = 2.0


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_tokenizer()
    im_end, endoftext = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    config = Qwen3Config(
        vocab_size=padded_vocab_size(tokenizer),
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        eos_token_id=im_end,
        pad_token_id=endoftext,
        dtype="float32",
        **SIZES[size],
    )
    model = Qwen3ForCausalLM(config)
    fill_random(model, seed, LAYER_GAIN, heads=("lm_head",))
    limit_head(model.lm_head, [*answer_token_ids(tokenizer), im_end], favoured=im_end, factor=EOS_FACTOR)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(path)
    save_tokenizer(tokenizer, path)
