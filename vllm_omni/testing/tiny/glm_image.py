# SPDX-License-Identifier: Apache-2.0
"""A tiny `GlmImagePipeline`: an autoregressive model makes tokens of a small and a large image, a DiT the image.

The architecture and the layout of the folder are the real ones; only the sizes are small. The first ids of the
vocabulary are image tokens, those of the text follow.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from tokenizers import AddedToken
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    Qwen2Tokenizer,
)

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components, make_image_vae
from vllm_omni.testing.tiny.text_encoders import make_t5
from vllm_omni.testing.tiny.tokenizer import byte_vocabulary, padded_vocab_size, token_id
from vllm_omni.testing.tiny.weights import fill_random

AR_GAIN = 2.0
GAINS = {"text_encoder": 2.0, "transformer": 1.5, "vae": 1.0}
NUM_SPECIALS = 8
"""Image tokens that are no codes: the start and the end of an image, and unused ones, as in the real vocabulary."""
PATCH = 16
"""Pixels of a patch of the vision tower, which sees half of an image's pixels on each side."""
NAMED_TOKENS = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
TOKENS = (*NAMED_TOKENS.values(), "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}
$START<|image|>$END
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size."""

    codebook: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    mrope: tuple[int, int, int] = (2, 3, 3)
    vision: int = 32
    vision_layers: int = 2
    dit_layers: int = 2
    dit_heads: int = 4
    text_hidden: int = 64


SIZES = {
    "default": Size(),
    "large": Size(
        codebook=512, hidden=256, layers=4, mrope=(4, 6, 6), vision=96, vision_layers=3, dit_layers=3, dit_heads=20,
        text_hidden=128,
    ),
}  # fmt: skip


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = GlmImagePipeline(**make_components(SIZES[size]))
    fill_random(pipe.vision_language_encoder.eval(), seed, AR_GAIN, heads=("lm_head",))
    fill_components(pipe, seed, GAINS)
    priors = torch.randint(SIZES[size].codebook, (1, 16), generator=torch.Generator().manual_seed(seed))
    transformer = pipe.transformer
    calibrate(pipe, transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64, prior_token_ids=priors)
    pipe.save_pretrained(path, safe_serialization=True)
    # diffusers takes transformers' classes for those of its folder `glm_image`; the published index has their library.
    index = path / "model_index.json"
    index.write_text(index.read_text().replace('"glm_image"', '"transformers"'))


def make_components(size: Size) -> dict[str, Any]:
    """Arguments of the pipeline's class."""
    tokenizer = make_glm_tokenizer(size)
    image_processor = GlmImageImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
        patch_size=PATCH,
        temporal_patch_size=1,
        merge_size=1,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    glyph_tokenizer: Any = ByT5Tokenizer()
    return {
        "tokenizer": glyph_tokenizer,
        "processor": GlmImageProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template),
        "text_encoder": make_t5(glyph_tokenizer, size.text_hidden, 2),
        "vision_language_encoder": _make_ar_model(size, tokenizer),
        "vae": _make_vae(),
        "transformer": GlmImageTransformer2DModel(
            num_layers=size.dit_layers,
            attention_head_dim=16,
            num_attention_heads=size.dit_heads,
            text_embed_dim=size.text_hidden,
            time_embed_dim=32,
            condition_dim=16,
            prior_vq_quantizer_codebook_size=size.codebook,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    }


def make_glm_tokenizer(size: Size) -> Qwen2Tokenizer:
    """Ids `0..codebook` are image tokens, then come `NUM_SPECIALS`, then text."""
    images = [f"<|dit_token_{index}|>" for index in range(size.codebook + NUM_SPECIALS)]
    start, end = images[size.codebook], images[size.codebook + 1]
    symbols, merges = byte_vocabulary()
    vocab = {token: index for index, token in enumerate((*images, *symbols))}
    no_unknown: Any = None  # every byte is known; the constructor's annotation says str
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=no_unknown,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        extra_special_tokens=NAMED_TOKENS,
        padding_side="left",
        model_max_length=65536,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*images, *TOKENS)])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("$START", start).replace("$END", end)
    return tokenizer


def _make_ar_model(size: Size, tokenizer: Qwen2Tokenizer) -> GlmImageForConditionalGeneration:
    text = {
        "vocab_size": padded_vocab_size(tokenizer),
        "vision_vocab_size": size.codebook + NUM_SPECIALS,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000,
            "partial_rotary_factor": 0.5,
            "mrope_section": list(size.mrope),
        },
        "eos_token_id": size.codebook + 1,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": size.vision_layers,
        "hidden_size": size.vision,
        "intermediate_size": 2 * size.vision,
        "num_heads": size.vision // 16,
        "patch_size": PATCH,
        "image_size": 4 * PATCH,
    }
    config = GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config={"embed_dim": 16, "num_embeddings": size.codebook, "latent_channels": size.vision},
        image_token_id=token_id(tokenizer, NAMED_TOKENS["image_token"]),
        image_start_token_id=size.codebook,
        image_end_token_id=size.codebook + 1,
        dtype="float32",
    )
    model = GlmImageForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.9, top_p=0.75, eos_token_id=size.codebook + 1, pad_token_id=size.codebook + 1
    )
    return model


def _make_vae() -> AutoencoderKL:
    """Makes a VAE whose latents' statistics are neither 0 nor 1, as in the real one."""
    means = [0.1 * (index % 5 - 2) for index in range(LATENT_CHANNELS)]
    stds = [1 + 0.05 * (index % 3) for index in range(LATENT_CHANNELS)]
    return make_image_vae(latents_mean=means, latents_std=stds)
