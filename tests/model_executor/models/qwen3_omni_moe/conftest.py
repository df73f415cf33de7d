# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni, whose oracle and engines all tests of this folder share."""

from pathlib import Path

import pytest

from tests.model_executor.models.omni import (
    OmniModel,
    cases,
    config,
    make_params,
    oracle,
    spoken,
    talker_engine,
    talker_prompts,
    thinker_engine,
    vocoder_engine,
)
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import TalkerToCode2Wav

from .helpers import Case

__all__ = [
    "cases", "config", "make_params", "oracle", "spoken", "talker_engine", "talker_prompts", "thinker_engine",
    "vocoder_engine",
]  # fmt: skip


@pytest.fixture(scope="session")
def omni(tiny_qwen3_omni_moe: Path) -> OmniModel:
    vocoder = ("Qwen3OmniMoeCode2Wav", "code2wav_config")
    return OmniModel(tiny_qwen3_omni_moe, "Qwen3OmniMoe", vocoder, TalkerToCode2Wav, Case)
