# SPDX-License-Identifier: Apache-2.0
"""Frameworks that speak OpenAI's protocol, unmodified, in the environment of `tests/clients`."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.sampling_params import StructuredOutputsParams

from tests.clients.running import ENVIRONMENT, client_environment, skip_without_clients
from tests.coloured_shapes.recordings import recording
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import MODEL, server_args
from tests.entrypoints.openai.realtime.conftest import TOOLS
from tests.entrypoints.openai.realtime.test_turns import needs_vad
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.realtime.output_items import SpokenMessage

GROUP = "llm"
SCRIPTS = Path(__file__).parent / "clients"
CALL = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'


@pytest.fixture
def calling_app(realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    """Its model can only write a call."""
    client = OmniEngineClient(realtime_llm)
    client.default_sampling_params["structured_outputs"] = StructuredOutputsParams(choice=[CALL])
    return asyncio.run(build_omni_app(client, server_args(tiny_qwen3_omni_moe, *TOOLS)))


@pytest.fixture
def first_answer_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has the first piece, and the rest waits until the answer is cancelled."""
    first: list[SpokenMessage] = []

    async def wait(message: SpokenMessage, seconds: float) -> None:
        if message in first:
            await asyncio.Event().wait()
        if not first:
            first.append(message)

    monkeypatch.setattr(SpokenMessage, "_wait", wait)


@pytest.mark.slow
@needs_vad
@pytest.mark.usefixtures("first_answer_is_slow")
@pytest.mark.parametrize("script", ["livekit_turns.py", "pipecat_turns.py"])
def test_turns_with_a_barge_in_and_tools(
    realtime_app: FastAPI, calling_app: FastAPI, script: str, tmp_path: Path
) -> None:
    skip_without_clients()
    sound = tmp_path / "speech.pcm"
    sound.write_bytes(recording("what colour is the circle").tobytes())
    with over_http(realtime_app) as url, over_http(calling_app) as tools_url:
        command = [ENVIRONMENT / "bin" / "python", SCRIPTS / script, url, tools_url, MODEL, sound]
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
