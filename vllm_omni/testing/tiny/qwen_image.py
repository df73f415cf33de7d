# SPDX-License-Identifier: Apache-2.0
"""A tiny `QwenImagePipeline`: text to image, the prompt read by a Qwen2.5-VL. Shared with `qwen_image_edit`."""

import re
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, Size, calibrate, fill_components
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer
from vllm_omni.testing.tiny.tokenizer import token_id, token_ids

VOCAB_SIZE = 1024
PATCH = 14
"""Pixels of a patch of the vision tower, on each side."""
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_end_token_id": "<|vision_end|>",
}

SIZES = {
    "default": Size(layers=2, heads=4, axes=(4, 6, 6), text_hidden=64, text_layers=2),
    "large": Size(layers=3, heads=5, axes=(16, 24, 24), text_hidden=128, text_layers=3),
}
GAINS = {"text_encoder": 2.0, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    pipe = QwenImagePipeline(**make_components(SIZES[size]))
    add_template_tokens(pipe.tokenizer, pipe.prompt_template_encode)
    fill_components(pipe, seed, GAINS)
    negative = {"negative_prompt": "dark"}
    calibrate(pipe, pipe.transformer.proj_out, pipe.vae.decoder.conv_out, height=64, width=64, **negative)
    pipe.save_pretrained(path, safe_serialization=True)


def make_components(size: Size, **transformer_settings: Any) -> dict[str, Any]:
    """Arguments of the pipeline's class.

    Args:
        transformer_settings: Further ones of its class.
    """
    tokenizer = make_qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,  # 2 x 2 latents are one token
        out_channels=LATENT_CHANNELS,
        num_layers=size.layers,
        attention_head_dim=sum(size.axes),
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_hidden,
        axes_dims_rope=size.axes,
        **transformer_settings,
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(
            qwen2_5_vl_config(tokenizer, size.text_hidden, size.text_layers)
        ),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def add_template_tokens(tokenizer: Qwen2Tokenizer, template: str) -> None:
    """Adds a token for each word of the pipeline's instruction to its text encoder.

    The pipeline drops as many tokens as the instruction has in the real tokenizer. Encoded in bytes it would be longer,
    and the rest of it would dominate the prompt.
    """
    instruction = template.split("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
    words = dict.fromkeys(re.findall(r"'s| ?\w+| ?[^\w\s]+", instruction))
    tokenizer.add_tokens([word for word in words if len(tokenizer.encode(word)) > 1])


def qwen2_5_vl_config(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> Qwen2_5_VLConfig:
    """Heads of 16; twice as many for queries as for keys and values."""
    heads = hidden // 16
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, "<|im_end|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }
    ids: dict[str, Any] = token_ids(tokenizer, VISION_TOKENS)
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        **ids,
        tie_word_embeddings=True,
        dtype="float32",
    )
