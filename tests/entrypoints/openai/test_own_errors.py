# SPDX-License-Identifier: Apache-2.0
"""A server whose pipeline ends on an error of its own says so, answers its requests, and ends."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from vllm.entrypoints.launchers.launcher import terminate_if_errored

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.orchestrator.pipelines import FAR
from tests.orchestrator.test_failure import wait_until
from tests.orchestrator.test_own_errors import fail
from vllm_omni import AsyncOmniLLM
from vllm_omni.errors import PipelineClosedError


def test_a_pipeline_that_ends_by_itself_is_unavailable(tmp_path: Path) -> None:
    with running(AsyncOmniLLM, tmp_path) as llm:
        server = FakeServer(llm)
        assert send(server.app, "GET", "/health").status_code == 200
        web = SimpleNamespace(should_exit=False)

        async def ask() -> list[tuple[dict, int]]:
            body = {"options": {"fake_seconds": FAR}}
            requests = [AppRequest(server.app, "/v1/generate", body) for _ in range(2)]
            await asyncio.to_thread(wait_until, lambda: llm._pipeline.orchestrator.activity()["writer"] == 2)
            fail(llm._pipeline.orchestrator)
            return [(await request.end(), request.status) for request in requests]

        for answer, status in asyncio.run(ask()):
            assert status == 503 and "an internal error" in answer["error"]["message"]
        health = send(server.app, "GET", "/health")
        assert health.status_code == 503 and health.json()["status"] == "unavailable"
        assert {stage["status"] for stage in health.json()["stages"]} == {"dead"}
        refused = send(server.app, "POST", "/v1/generate", json={})
        assert refused.status_code == 503 and "an internal error" in refused.json()["error"]["message"]
        terminate_if_errored(web, server.client)  # type: ignore[arg-type]
        assert web.should_exit and isinstance(server.client.dead_error, PipelineClosedError)
        assert "restart the server" in str(server.client.dead_error) and not llm.is_open
