# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni, whose oracle and engines all tests of this folder share."""

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
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import TalkerToToken2Wav

from .helpers import Case

__all__ = [
    "cases", "config", "make_params", "oracle", "spoken", "talker_engine", "talker_prompts", "thinker_engine",
    "vocoder_engine",
]  # fmt: skip


@pytest.fixture(scope="session")
def omni(tiny_qwen2_5_omni: Path) -> OmniModel:
    vocoder = ("Qwen2_5OmniToken2WavModel", "token2wav_config")
    speakers = ("Chelsie", "Ethan", "Aiden")
    return OmniModel(tiny_qwen2_5_omni, "Qwen2_5Omni", vocoder, TalkerToToken2Wav, Case, speakers)
