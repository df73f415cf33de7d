# SPDX-License-Identifier: Apache-2.0
"""A pipeline that converses, with short answers, and OpenAI's client for its sessions."""

from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async
from tests.entrypoints.openai.media_apps import TOOL_FLAGS, app_of
from tests.entrypoints.openai.realtime.level_detector import LevelDetector
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

NUM_TOKENS, NUM_FRAMES = 12, 12
SHORT = {
    "thinker": {"temperature": 0.0, "max_tokens": NUM_TOKENS},
    "talker": {"temperature": 0.0, "max_tokens": NUM_FRAMES, "ignore_eos": True},
}


@pytest.fixture(scope="session")
def realtime_llm(talking_llm: OmniLLM) -> AsyncOmniLLM:
    """Qwen3-Omni, greedy, about a second of speech."""
    return as_async(talking_llm, **SHORT)


@pytest.fixture(scope="session")
def realtime_app(realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    return app_of(OmniEngineClient(realtime_llm), tiny_qwen3_omni_moe, *TOOL_FLAGS)


@pytest.fixture
def level_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions find turns by their levels."""
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", LevelDetector)
