# SPDX-License-Identifier: Apache-2.0
"""A tiny `QwenImageEditPlusPipeline`: one or several images and an instruction to another image."""

from pathlib import Path

from diffusers import QwenImageEditPlusPipeline

from vllm_omni.testing.tiny import qwen_image_edit

SIZES = qwen_image_edit.SIZES


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    qwen_image_edit.write_pipeline(QwenImageEditPlusPipeline, path, seed, size)
