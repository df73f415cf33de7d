# SPDX-License-Identifier: Apache-2.0
"""What the tiny Qwen omni models share: files of the multimodal processor, and fields of their configurations."""

import json
from pathlib import Path
from typing import Any

from transformers import WhisperFeatureExtractor

MERGE = 2
"""Patches of one token, on each side."""


def vision_tower(hidden: int, layers: int, patch: int, output: int) -> dict[str, Any]:
    """Fields that the vision configurations have in common; `output` is the thinker's hidden size."""
    return {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // 32,
        "patch_size": patch,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": output,
    }


def audio_tower(hidden: int, layers: int, output: int) -> dict[str, Any]:
    """Fields that the audio configurations have in common; `output` is the thinker's hidden size."""
    return {
        "num_mel_bins": 128,
        "encoder_layers": layers,
        "encoder_attention_heads": hidden // 32,
        "encoder_ffn_dim": 2 * hidden,
        "d_model": hidden,
        "output_dim": output,
    }


def decoder(hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Fields that the configurations of thinkers, talkers and what follows them have in common."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def save_processors(path: Path, processor_class: str, patch: int) -> None:
    """Writes preprocessor_config.json (image and audio in one file, as in real checkpoints) and the video one.

    Args:
        patch: Pixels of one patch, on each side.
    """
    image = _vision_fields("image_processor_type", "Qwen2VLImageProcessor", patch)
    # Audio is padded to the longest clip; 30 seconds keep it short.
    audio = WhisperFeatureExtractor(feature_size=128, chunk_length=30).to_dict()
    audio.pop("mel_filters", None)  # computed when it is loaded
    common = {**audio, **image, "processor_class": processor_class}
    video = _vision_fields("video_processor_type", "Qwen2VLVideoProcessor", patch)
    write_json(path / "preprocessor_config.json", common)
    write_json(path / "video_preprocessor_config.json", {**video, "processor_class": processor_class})


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _vision_fields(type_key: str, type_name: str, patch: int) -> dict[str, Any]:
    token_pixels = (patch * MERGE) ** 2
    return {
        type_key: type_name,
        "size": {"shortest_edge": 4 * token_pixels, "longest_edge": 64 * token_pixels},
        "patch_size": patch,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
