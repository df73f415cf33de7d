# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-Omni-MoE: thinker with vision and audio towers, talker with code predictor, vocoder.

The architecture is the real one; only the sizes are small. Fields that transformers does not declare but
that it or vLLM reads are marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from vllm_omni.testing.tiny.processors import MERGE, audio_tower, decoder, save_processors, vision_tower
from vllm_omni.testing.tiny.tokenizer import (
    answer_token_ids,
    generation_config,
    make_tokenizer,
    padded_vocab_size,
    save_tokenizer,
    token_id,
    token_ids,
)
from vllm_omni.testing.tiny.weights import fill_random, limit_head, scale_output

PATCH = 16
NUM_SPECIAL_CODES = 1024
"""The last ids of the talker's vocabulary: never sampled, except codec_eos."""
MAX_POSITIONS = 32768
THINKER_EOS_FACTOR = 1.1
TALKER_EOS_FACTOR = 1.2
VOCODER_GAIN = 0.8
"""Residual branches add up over many units: at a larger gain the periodic activations would be small beside the
residual stream, and their sines would take a slow path that no trained vocoder takes."""
WAVE_STD = 0.15
HEADS = ("lm_head", "codec_head")


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size.

    `deepstack` are the vision layers whose outputs enter the thinker's first layers; `accept_layer`, the
    thinker state that the talker reads, must be a later one.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    expert_hidden: int = 64
    tower_hidden: int = 64
    tower_layers: int = 2
    deepstack: tuple[int, ...] = (0,)
    accept_layer: int = 2
    talker_hidden: int = 64
    talker_layers: int = 2
    talker_heads: int = 2
    talker_expert_hidden: int = 32
    predictor_layers: int = 2
    code_groups: int = 4
    codebook: int = 128
    vocoder_hidden: int = 64
    vocoder_layers: int = 2
    vocoder_window: int = 8
    decoder_dim: int = 64
    layer_gain: float = 2.0


SIZES = {
    "default": Size(),
    "large": Size(
        hidden=512,
        layers=8,
        heads=8,
        head_dim=64,
        expert_hidden=256,
        tower_hidden=256,
        tower_layers=4,
        deepstack=(1, 2),
        accept_layer=5,
        talker_hidden=384,
        talker_layers=6,
        talker_heads=6,
        talker_expert_hidden=128,
        predictor_layers=3,
        code_groups=8,
        codebook=512,
        vocoder_hidden=256,
        vocoder_layers=4,
        vocoder_window=16,
        decoder_dim=256,
        layer_gain=1.5,
    ),
}


def write(path: Path, seed: int, size: str | Size) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    size = SIZES[size] if isinstance(size, str) else size
    tokenizer = make_tokenizer()
    config = make_config(size, tokenizer)
    model = Qwen3OmniMoeForConditionalGeneration(config)
    fill_random(model, seed, size.layer_gain, heads=HEADS)
    fill_random(model.code2wav, seed, VOCODER_GAIN)
    _shape_outputs(model, tokenizer)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(path)
    save_tokenizer(tokenizer, path)
    save_processors(path, "Qwen3OmniMoeProcessor", PATCH)


def make_config(size: Size, tokenizer: Qwen2Tokenizer) -> Qwen3OmniMoeConfig:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    media_ids = multimodal_ids(tokenizer)
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker_config(size, padded_vocab_size(tokenizer), media_ids),
        talker_config=_talker_config(size, media_ids),
        code2wav_config=_code2wav_config(size),
        dtype="float32",
        **control_ids(tokenizer),
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


def control_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Fields of the model's configuration that name tokens."""
    names = {
        "im_start_token_id": "<|im_start|>",
        "im_end_token_id": "<|im_end|>",
        "tts_pad_token_id": "<tts_pad>",
        "tts_bos_token_id": "<tts_text_bos>",
        "tts_eos_token_id": "<tts_text_eod>",
        "system_token_id": "system",
        "user_token_id": "user",
        "assistant_token_id": "assistant",
    }
    return token_ids(tokenizer, names)


def multimodal_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Fields of the thinker's configuration that name tokens."""
    names = {
        "audio_token_id": "<|audio_pad|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "audio_start_token_id": "<|audio_start|>",
        "audio_end_token_id": "<|audio_end|>",  # undeclared; vLLM reads it
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "user_token_id": "user",
    }
    return token_ids(tokenizer, names)


def rope(head_dim: int) -> dict[str, Any]:
    """M-RoPE, interleaved: how many of the head's frequencies each of time, height and width gets."""
    side = head_dim // 2 // 3
    return {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [head_dim // 2 - 2 * side, side, side],
        "interleaved": True,
        "mrope_interleaved": True,
    }


def _thinker_config(size: Size, vocab_size: int, media_ids: dict[str, int]) -> dict[str, Any]:
    text_config = {
        "vocab_size": vocab_size,
        **decoder(size.hidden, size.layers, size.heads, size.kv_heads),
        "head_dim": size.head_dim,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.expert_hidden,
        "norm_topk_prob": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope(size.head_dim),
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    return {
        "text_config": text_config,
        "vision_config": _vision_config(size),
        "audio_config": _audio_config(size),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        **media_ids,
    }


def _vision_config(size: Size) -> dict[str, Any]:
    return vision_tower(size.tower_hidden, size.tower_layers, PATCH, size.hidden) | {
        "num_position_embeddings": 64,
        "image_size": 8 * PATCH,  # undeclared; vLLM reads it: the grid of position embeddings times the patch
        "apply_vit_abs_pos_embed": True,  # undeclared; vLLM reads it
        "deepstack_visual_indexes": list(size.deepstack),
    }


def _audio_config(size: Size) -> dict[str, Any]:
    return audio_tower(size.tower_hidden, size.tower_layers, size.hidden) | {
        "downsample_hidden_size": size.tower_hidden // 4,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
    }


def _talker_config(size: Size, media_ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": _talker_text_config(size),
        "code_predictor_config": _code_predictor_config(size),
        "num_code_groups": size.code_groups,
        "thinker_hidden_size": size.hidden,
        "accept_hidden_layer": size.accept_layer,
        "spatial_merge_size": MERGE,  # undeclared; transformers reads it
        **codec_ids(size.codebook, ("ethan", "chelsie", "aiden")),
        "position_id_per_seconds": 13,
        **{name: token for name, token in media_ids.items() if name != "user_token_id"},
    }


def codec_ids(codebook: int, speakers: Sequence[str]) -> dict[str, Any]:
    """Fields of the talker's configuration that name codes: the ids that follow those of the codebook."""
    names = ("pad_id", "bos_id", "eos_token_id", "nothink_id", "think_bos_id", "think_eos_id")
    ids: dict[str, Any] = {f"codec_{name}": codebook + index for index, name in enumerate(names)}
    return ids | {"speaker_id": {name: codebook + len(names) + i for i, name in enumerate(speakers)}}


def _talker_text_config(size: Size) -> dict[str, Any]:
    head_dim = size.talker_hidden // size.talker_heads
    return {
        "vocab_size": size.codebook + NUM_SPECIAL_CODES,
        **decoder(size.talker_hidden, size.talker_layers, size.talker_heads, size.talker_heads // 2),
        "head_dim": head_dim,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.talker_expert_hidden,
        "shared_expert_intermediate_size": size.talker_expert_hidden + 16,  # undeclared; required
        "norm_topk_prob": False,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope(head_dim),
    }


def _code_predictor_config(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.codebook,
        **decoder(size.talker_hidden, size.predictor_layers, size.talker_heads, size.talker_heads // 2),
        "head_dim": size.talker_hidden // size.talker_heads,
        "num_code_groups": size.code_groups,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def _code2wav_config(size: Size) -> dict[str, Any]:
    heads = size.vocoder_hidden // 32
    return {
        "codebook_size": size.codebook,
        "num_quantizers": size.code_groups,
        **decoder(size.vocoder_hidden, size.vocoder_layers, heads, heads),
        "sliding_window": size.vocoder_window,
        "decoder_dim": size.decoder_dim,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


def _shape_outputs(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Limits the thinker to words and the talker to codes, makes both stop sometimes, and keeps the wave in range."""
    config: Any = model.config.talker_config
    im_end, codec_eos = token_id(tokenizer, "<|im_end|>"), config.codec_eos_token_id
    words = answer_token_ids(tokenizer)
    codes = list(range(config.code_predictor_config.vocab_size))
    limit_head(model.thinker.lm_head, [*words, im_end], favoured=im_end, factor=THINKER_EOS_FACTOR)
    limit_head(model.talker.codec_head, [*codes, codec_eos], favoured=codec_eos, factor=TALKER_EOS_FACTOR)
    _scale_wave(model.code2wav)


def _scale_wave(vocoder: Qwen3OmniMoeCode2Wav) -> None:
    """Scales the last convolution so that few samples are clipped at +-1, where errors do not show."""
    codes = torch.arange(16) * torch.arange(1, vocoder.config.num_quantizers + 1)[:, None]
    last_conv: Any = vocoder.decoder[-1].conv
    scale_output(last_conv, WAVE_STD, lambda: vocoder((codes % vocoder.config.codebook_size)[None]))
