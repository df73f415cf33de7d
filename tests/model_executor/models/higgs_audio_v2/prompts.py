# SPDX-License-Identifier: Apache-2.0
"""Prompts of every kind for Higgs Audio."""

from typing import Any

from tests.model_executor.models.csm.prompts import sound

PROMPTS: dict[str, dict[str, Any]] = {
    "words": {"prompt": "sound and light"},
    "scene": {"prompt": "hello there", "additional_information": {"instructions": "a small house by the sea"}},
    "long": {"prompt": "look at the white dog"},
    "short": {"prompt": "a b c"},
    "reference": {
        "prompt": "water and wind",
        "additional_information": {"ref_audio": sound(1.25, 1), "ref_text": "good day"},
    },
    "uneven": {
        "prompt": "two cats",
        "additional_information": {
            "instructions": "a quiet night",
            "ref_audio": sound(1.003, 2),
            "ref_text": "the river",
        },
    },
}
