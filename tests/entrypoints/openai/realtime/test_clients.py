# SPDX-License-Identifier: Apache-2.0
"""Frameworks that speak OpenAI's protocol, unmodified, in the environment of `tests/clients`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.clients.running import ENVIRONMENT, client_environment, skip_without_clients
from tests.coloured_shapes.recordings import recording
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import MODEL, app_that_writes
from tests.entrypoints.openai.realtime.fake_chat import TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.test_turns import needs_vad
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta

GROUP = "llm"
SCRIPTS = Path(__file__).parent / "clients"
CALL = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'


@pytest.fixture
def calling_app(realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    """Its model can only write a call."""
    return app_that_writes(realtime_llm, tiny_qwen3_omni_moe, CALL)


@pytest.fixture
def slow_app() -> FastAPI:
    """The first answer of a session stops after its first piece, until it is cancelled."""
    chat = FakeChat(hears=True)

    def answer(messages: list[Any]) -> Iterator[ChatDelta]:
        chat.may_end = True
        yield ChatDelta(text="Listen to this.")
        chat.may_end = [message["role"] for message in messages].count("user") > 1
        for _ in range(6):
            yield ChatDelta(speech=TONE)

    chat.answer = answer
    return session_app(chat, model=MODEL)


@pytest.mark.slow
@needs_vad
@pytest.mark.parametrize("script", ["livekit_turns.py", "pipecat_turns.py"])
def test_turns_with_a_barge_in_and_tools(
    realtime_app: FastAPI, slow_app: FastAPI, calling_app: FastAPI, script: str, tmp_path: Path
) -> None:
    skip_without_clients()
    sound = tmp_path / "speech.pcm"
    sound.write_bytes(recording("what colour is the circle").tobytes())
    with over_http(realtime_app) as url, over_http(slow_app) as slow_url, over_http(calling_app) as tools_url:
        command = [ENVIRONMENT / "bin" / "python", SCRIPTS / script, url, slow_url, tools_url, MODEL, sound]
        run = subprocess.run(command, env=client_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert result["errors"] == []
    interrupted = result["interrupted"]
    assert 0 < interrupted["heard"] <= 0.2, "the first piece"
    assert interrupted.get("cancelled", [True, False]) == [True, False]
    assert result["calls"] == [["dive", {"sea": "red"}]] * 2
    turns = [interrupted["answer"], *result["turns"]]
    assert all(turn["text"] and turn["seconds"] > 0.5 for turn in turns), result
