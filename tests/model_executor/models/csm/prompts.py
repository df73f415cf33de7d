# SPDX-License-Identifier: Apache-2.0
"""Prompts of every kind for CSM."""

from typing import Any

import torch

RATE = 24000


def sound(seconds: float, seed: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    return 0.2 * torch.randn(int(seconds * RATE), generator=generator), RATE


PROMPTS: dict[str, dict[str, Any]] = {
    "words": {"prompt": "sound and light"},
    "another voice": {"prompt": "hello there", "additional_information": {"speaker": "3"}},
    "long": {"prompt": "look at the white dog"},
    "short": {"prompt": "a b c"},
    "reference": {
        "prompt": "water and wind",
        "additional_information": {"speaker": "1", "ref_audio": sound(1.25, 1), "ref_text": "good day"},
    },
    "context": {
        "prompt": "two cats",
        "additional_information": {
            "context": [
                {"speaker": "1", "text": "one river", "audio": sound(1.6, 2)},
                {"text": "my house", "audio": sound(0.03, 3)},
            ]
        },
    },
    "both": {
        "prompt": "red and blue",
        "additional_information": {
            "ref_audio": sound(0.5, 4),
            "ref_text": "the sea",
            "context": [{"speaker": 2, "text": "yes", "audio": sound(2.001, 5)}],
        },
    },
}
