# SPDX-License-Identifier: Apache-2.0
"""A tiny `JanusForConditionalGeneration`: a Llama that makes an image's tokens, and the VQ decoder that paints them.

The architecture, the names of weights and the files are the real ones; only the sizes are small.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    Qwen2Tokenizer,
)

from vllm_omni.testing.tiny.tokenizer import byte_vocabulary, padded_vocab_size, token_id
from vllm_omni.testing.tiny.weights import fill_random, scale_output

LAYER_GAIN = 2.0
PATCH = 4
"""Pixels of a patch, and of an image's token: the decoder upsamples twice."""
NAMED_TOKENS = {
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_placeholder>",
}
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
CHAT_TEMPLATE = """\
<bos>
{%- for message in messages -%}
{{ "<|User|>: " if message.role == "user" else "<|Assistant|>: " }}
{%- for part in message.content -%}
{{ part.text }}
{%- endfor -%}
{{ "\n\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|Assistant|>:
{%- endif -%}
"""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size."""

    grid: int = 4
    codebook: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    channels: tuple[int, ...] = (1, 1, 2)


SIZES = {
    "default": Size(),
    "large": Size(grid=8, codebook=256, hidden=320, layers=4, heads=10, kv_heads=10, channels=(1, 2, 2)),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    sizes = SIZES[size]
    tokenizer = make_janus_tokenizer()
    model = _make_model(sizes, tokenizer)
    fill_random(model, seed, LAYER_GAIN, heads=("vision_head",))
    vqmodel = model.model.vqmodel
    tokens = torch.randint(sizes.codebook, (1, sizes.grid**2), generator=torch.Generator().manual_seed(seed))
    scale_output(vqmodel.decoder.conv_out, 0.5, lambda: vqmodel.decode(tokens))  # few pixels outside of [-1, 1]
    model.save_pretrained(path, safe_serialization=True)
    image_processor = JanusImageProcessor(
        size={"height": sizes.grid * PATCH, "width": sizes.grid * PATCH}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = JanusProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE, num_image_tokens=sizes.grid**2)
    processor.save_pretrained(path)


def make_janus_tokenizer() -> Qwen2Tokenizer:
    vocab, merges = byte_vocabulary()
    no_unknown: Any = None  # every byte is known; the constructor's annotation says str
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=no_unknown,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=NAMED_TOKENS,
        model_max_length=2048,
    )
    specials = (BOS, EOS, PAD, *NAMED_TOKENS.values(), "<|User|>", "<|Assistant|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _make_model(size: Size, tokenizer: Qwen2Tokenizer) -> JanusForConditionalGeneration:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": size.grid * PATCH,
        "patch_size": PATCH,
        "projection_dim": size.hidden,
        "num_image_tokens": size.grid**2,
    }
    vq = {
        "embed_dim": 8,
        "num_embeddings": size.codebook,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": list(size.channels),
        "num_res_blocks": 1,
        "projection_dim": size.hidden,
        "image_token_embed_dim": size.hidden,
    }
    text = {
        "vocab_size": padded_vocab_size(tokenizer),
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=token_id(tokenizer, NAMED_TOKENS["image_token"]),
        dtype="float32",
    )
    model = JanusForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        guidance_scale=5.0,
        generation_kwargs={"boi_token_id": token_id(tokenizer, NAMED_TOKENS["boi_token"])},
    )
    return model
