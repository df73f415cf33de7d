# SPDX-License-Identifier: Apache-2.0
"""The configuration of the omni model: Qwen3-Omni's classes in a small size."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeConfig

from training.codec import NUM_CODES, NUM_GROUPS, vocoder_config
from training.pictures import SIDE
from training.tokenizer import save
from vllm_omni.testing.tiny.processors import MERGE, save_processors, write_json
from vllm_omni.testing.tiny.tokenizer import padded_vocab_size, token_ids

PATCH = 16
NUM_SPECIAL_CODES = 1024
"""The last ids of the talker's vocabulary: never sampled, except `codec_eos`."""
MAX_POSITIONS = 4096
HIDDEN, HEAD_DIM = 192, 32
TALKER_HIDDEN = 192
SPEAKER_IDS = {"ada": NUM_CODES + 6, "ben": NUM_CODES + 7}


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3OmniMoeConfig:
    media = token_ids(
        tokenizer,
        {
            "audio_token_id": "<|audio_pad|>",
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "audio_start_token_id": "<|audio_start|>",
            "audio_end_token_id": "<|audio_end|>",  # undeclared; vLLM reads it
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "user_token_id": "user",
        },
    )
    control = token_ids(
        tokenizer,
        {
            "im_start_token_id": "<|im_start|>",
            "im_end_token_id": "<|im_end|>",
            "tts_pad_token_id": "<tts_pad>",
            "tts_bos_token_id": "<tts_text_bos>",
            "tts_eos_token_id": "<tts_text_eod>",
            "system_token_id": "system",
            "user_token_id": "user",
            "assistant_token_id": "assistant",
        },
    )
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker(padded_vocab_size(tokenizer), media),  # type: ignore[arg-type]
        talker_config=_talker(media),
        code2wav_config=vocoder_config().to_dict(),
        dtype="float32",
        **control,
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [6, 5, 5],
    "interleaved": True,
    "mrope_interleaved": True,
}


def _thinker(vocab_size: int, media: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": vocab_size, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 6,
            "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": HEAD_DIM, "num_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 256, "norm_topk_prob": True,
            "max_position_embeddings": MAX_POSITIONS, "rope_parameters": _ROPE, "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        "vision_config": {
            "depth": 3, "hidden_size": 96, "intermediate_size": 192, "num_heads": 3, "patch_size": PATCH,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
            "image_size": 6 * PATCH,  # undeclared; vLLM reads it: the grid of position embeddings times the patch
            "apply_vit_abs_pos_embed": True,  # undeclared; vLLM reads it
        },
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 2 * HIDDEN,
            "d_model": HIDDEN, "output_dim": HIDDEN, "downsample_hidden_size": 48, "n_window": 50,
            "n_window_infer": 800, "conv_chunksize": 500,
        },
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        **media,
    }  # fmt: skip


def _talker(media: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": NUM_CODES + NUM_SPECIAL_CODES, "hidden_size": TALKER_HIDDEN,
            "intermediate_size": 2 * TALKER_HIDDEN, "num_hidden_layers": 5, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": HEAD_DIM, "num_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": TALKER_HIDDEN,
            "shared_expert_intermediate_size": TALKER_HIDDEN,  # undeclared; required
            "norm_topk_prob": False, "max_position_embeddings": MAX_POSITIONS, "rope_parameters": _ROPE,
        },
        "code_predictor_config": {
            "vocab_size": NUM_CODES, "hidden_size": TALKER_HIDDEN, "intermediate_size": 2 * TALKER_HIDDEN,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": HEAD_DIM,
            "num_code_groups": NUM_GROUPS, "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "num_code_groups": NUM_GROUPS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 2,
        "spatial_merge_size": MERGE,  # undeclared; transformers reads it
        "codec_pad_id": NUM_CODES,
        "codec_bos_id": NUM_CODES + 1,
        "codec_eos_token_id": NUM_CODES + 2,
        "codec_nothink_id": NUM_CODES + 3,
        "codec_think_bos_id": NUM_CODES + 4,
        "codec_think_eos_id": NUM_CODES + 5,
        "speaker_id": SPEAKER_IDS,
        "position_id_per_seconds": 13,
        **{name: token for name, token in media.items() if name != "user_token_id"},
    }  # fmt: skip


def save_processor(tokenizer: PreTrainedTokenizerFast, config: Qwen3OmniMoeConfig, folder: Path) -> None:
    """Writes the configuration, the tokenizer, and processors that scale every picture to one size."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save(tokenizer, folder)
    save_processors(folder, "Qwen3OmniMoeProcessor", PATCH)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        fields = json.loads((folder / name).read_text())
        fields["size"] = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
        write_json(folder / name, fields)
