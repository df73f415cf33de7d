# SPDX-License-Identifier: Apache-2.0
"""The configuration of the omni model: Qwen3-Omni's classes in a small size."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeConfig

from coloured_shapes.pictures import SIDE
from coloured_shapes.speech import SPEAKERS
from training.codec import NUM_CODES, NUM_GROUPS, vocoder_config
from vllm_omni.testing.tiny.processors import MERGE, audio_tower, decoder, save_processors, vision_tower, write_json
from vllm_omni.testing.tiny.qwen3_omni_moe import NUM_SPECIAL_CODES, codec_ids, control_ids, multimodal_ids, rope
from vllm_omni.testing.tiny.tokenizer import padded_vocab_size, save_tokenizer

PATCH = 16
MAX_POSITIONS = 4096
HIDDEN, HEAD_DIM = 192, 32
TALKER_HIDDEN = 192
NUM_MELS = 64
"""Of what it hears."""


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3OmniMoeConfig:
    media = multimodal_ids(tokenizer)
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker(padded_vocab_size(tokenizer), media),
        talker_config=_talker(media),
        code2wav_config=vocoder_config().to_dict(),
        dtype="float32",
        **control_ids(tokenizer),
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


_ROPE = rope(HEAD_DIM) | {"rope_theta": 1e4}


def _thinker(vocab_size: int, media: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {
            **decoder(HIDDEN, 4, 6, 3), "vocab_size": vocab_size, "head_dim": HEAD_DIM, "num_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 256, "norm_topk_prob": True,
            "max_position_embeddings": MAX_POSITIONS, "rope_parameters": _ROPE, "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        "vision_config": {
            **vision_tower(96, 3, PATCH, HIDDEN),
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
            "image_size": 6 * PATCH,  # undeclared; vLLM reads it: the grid of position embeddings times the patch
            "apply_vit_abs_pos_embed": True,  # undeclared; vLLM reads it
        },
        "audio_config": {
            **audio_tower(HIDDEN, 4, HIDDEN), "num_mel_bins": NUM_MELS, "downsample_hidden_size": 32, "n_window": 50,
            "n_window_infer": 800, "conv_chunksize": 500,
        },
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        **media,
    }  # fmt: skip


def _talker(media: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {
            **decoder(TALKER_HIDDEN, 4, 6, 3),
            "vocab_size": NUM_CODES + NUM_SPECIAL_CODES, "head_dim": HEAD_DIM,
            "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": TALKER_HIDDEN,
            "shared_expert_intermediate_size": TALKER_HIDDEN,  # undeclared; required
            "norm_topk_prob": False, "max_position_embeddings": MAX_POSITIONS, "rope_parameters": _ROPE,
        },
        "code_predictor_config": {
            **decoder(TALKER_HIDDEN, 2, 6, 3), "vocab_size": NUM_CODES, "head_dim": HEAD_DIM,
            "num_code_groups": NUM_GROUPS, "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "num_code_groups": NUM_GROUPS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 2,
        "spatial_merge_size": MERGE,  # undeclared; transformers reads it
        **codec_ids(NUM_CODES, [name.lower() for name in SPEAKERS]),
        "position_id_per_seconds": 13,
        **{name: token for name, token in media.items() if name != "user_token_id"},
    }  # fmt: skip


def save_processor(tokenizer: PreTrainedTokenizerFast, config: Qwen3OmniMoeConfig, folder: Path) -> None:
    """Writes the configuration, the tokenizer, and processors that scale every picture to one size."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    save_processors(folder, "Qwen3OmniMoeProcessor", PATCH)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        fields = json.loads((folder / name).read_text())
        if "feature_size" in fields:
            fields["feature_size"] = NUM_MELS
        fields["size"] = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
        write_json(folder / name, fields)
