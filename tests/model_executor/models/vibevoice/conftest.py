# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's reference on the tiny checkpoint."""

from pathlib import Path

import pytest

from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference


@pytest.fixture(scope="session")
def reference(tiny_vibevoice: Path) -> VibeVoiceReference:
    return VibeVoiceReference(tiny_vibevoice)
