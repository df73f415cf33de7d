# SPDX-License-Identifier: Apache-2.0
"""Prompts of every kind for Qwen3-TTS, and sounds. Needs torch only: the reference's environment reads it too."""

import math
from typing import Any

import torch

RATE = 24000
MAX_FRAMES = 39
"""Of greedy speech. The reference stops one frame before its `max_new_tokens`."""


def sound(seconds: float, seed: int) -> tuple[torch.Tensor, int]:
    """A chord that swells and fades in some noise, mono."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(seconds * RATE), dtype=torch.float64) / RATE
    pitches = 80 * 2 ** (4 * torch.rand(4, generator=generator, dtype=torch.float64))
    chord = torch.sin(2 * math.pi * pitches[:, None] * time).mean(0) * torch.sin(2 * math.pi * time / 0.7) ** 2
    noise = torch.randn(len(time), generator=generator, dtype=torch.float64)
    return (0.3 * chord + 0.02 * noise).float(), RATE


def _prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, "additional_information": fields}


PROMPTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_tts": {
        "default layout": _prompt("the white dog", speaker="ryan", language="english"),
        "no language": _prompt("a quiet river and a bright house", speaker="vivian"),
        "streaming": _prompt("hello there you", speaker="Vivian", language="German", non_streaming_mode=False),
        "streaming, no language": _prompt("the sea", speaker="ryan", language="auto", non_streaming_mode=False),
        "dialect": _prompt("two cats look at the wind", speaker="eric"),
        "dialect in another language": _prompt("yes", speaker="eric", language="english"),
        "instruct": _prompt("good day", speaker="vivian", language="chinese", instruct="speak slow and low"),
    },
    "qwen3_tts_design": {
        "default layout": _prompt("red and blue", instruct="a bright voice", language="english"),
        "streaming": _prompt("the long night", instruct="an old man", non_streaming_mode=False),
        "no instruct": _prompt("my house", language="german"),
    },
    "qwen3_tts_base": {
        "vector": _prompt("water and wind", ref_audio=sound(1.3, 1), x_vector_only_mode=True, language="english"),
        "vector, whole text": _prompt(
            "two trees", ref_audio=sound(0.9, 2), x_vector_only_mode=True, non_streaming_mode=True
        ),
        "short text": _prompt("one river", ref_audio=sound(1.6, 3), ref_text="good day"),
        "long text": _prompt(
            "look at the small white house by the river", ref_audio=sound(0.5, 4), ref_text="the sea", language="german"
        ),
        "whole text": _prompt(
            "over there", ref_audio=sound(0.81, 5), ref_text="hello", language="chinese", non_streaming_mode=True
        ),
    },
}
"""By checkpoint and name."""
