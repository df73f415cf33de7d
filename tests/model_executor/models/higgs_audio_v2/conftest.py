# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's reference on the tiny checkpoint."""

from pathlib import Path

import pytest

from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference


@pytest.fixture(scope="session")
def reference(tiny_higgs_audio_v2: Path) -> HiggsAudioReference:
    return HiggsAudioReference(tiny_higgs_audio_v2)
