# SPDX-License-Identifier: Apache-2.0
"""How VibeVoice's checkpoint wants to be sampled: guidance, and the solver of its diffusion head."""

from typing import Any

from transformers import GenerationConfig


def read_generation_config(checkpoint: str, revision: str | None) -> Any:
    """The checkpoint's; one of defaults where it has none."""
    try:
        return GenerationConfig.from_pretrained(checkpoint, revision=revision or "main")
    except OSError:
        return GenerationConfig()
