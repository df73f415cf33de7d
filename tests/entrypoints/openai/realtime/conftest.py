# SPDX-License-Identifier: Apache-2.0
"""A pipeline that converses, with short answers, and OpenAI's client for its sessions."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import server_args
from tests.entrypoints.openai.realtime.level_detector import LevelDetector
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

NUM_TOKENS, NUM_FRAMES = 12, 12
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
SHORT = {
    "thinker": {"default_sampling_params": {"temperature": 0.0, "max_tokens": NUM_TOKENS}},
    "talker": {"default_sampling_params": {"temperature": 0.0, "max_tokens": NUM_FRAMES, "ignore_eos": True}},
}


@pytest.fixture(scope="session")
def realtime_llm(tiny_qwen3_omni_moe: Path) -> Iterator[AsyncOmniLLM]:
    """Qwen3-Omni, greedy, about a second of speech."""
    small = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    with AsyncOmniLLM(str(tiny_qwen3_omni_moe), stage_overrides=SHORT, **small) as llm:
        yield llm


@pytest.fixture(scope="session")
def realtime_app(realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    args = server_args(tiny_qwen3_omni_moe, *TOOLS)
    return asyncio.run(build_omni_app(OmniEngineClient(realtime_llm), args))


@pytest.fixture
def level_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions find turns by their levels."""
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", LevelDetector)
