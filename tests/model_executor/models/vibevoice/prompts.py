# SPDX-License-Identifier: Apache-2.0
"""Prompts of every kind for VibeVoice."""

from typing import Any

from tests.model_executor.models.csm.prompts import sound

PROMPTS: dict[str, dict[str, Any]] = {
    "words": {"prompt": "sound and light"},
    "long": {"prompt": "look at the white dog"},
    "script": {"prompt": "Speaker 1: hello there\nSpeaker 2: good day\nSpeaker 1: yes"},
    "voice": {"prompt": "water and wind", "additional_information": {"ref_audio": sound(1.25, 1)}},
    "voices": {
        "prompt": "Speaker 2: one river\nSpeaker 3: two cats",
        "additional_information": {
            "ref_audio": sound(0.7, 2),
            "context": [{"speaker": "3", "audio": sound(0.4, 3)}],
            "guidance_scale": 2.0,
        },
    },
    "unguided": {"prompt": "my old home", "additional_information": {"guidance_scale": 1}},
}
