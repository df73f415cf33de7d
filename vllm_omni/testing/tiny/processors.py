# SPDX-License-Identifier: Apache-2.0
"""The files from which HF transformers and vLLM build the multimodal processor of a Qwen omni model."""

import json
from pathlib import Path
from typing import Any

from transformers import WhisperFeatureExtractor

MERGE = 2
"""Patches of one token, on each side."""


def save_processors(path: Path, processor_class: str, patch: int) -> None:
    """Writes preprocessor_config.json (image and audio in one file, as in real checkpoints) and the video one.

    Args:
        patch: Pixels of one patch, on each side.
    """
    image = _vision_fields("image_processor_type", "Qwen2VLImageProcessor", patch)
    # Audio is padded to the longest clip, so that it is kept short: 30 seconds.
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
