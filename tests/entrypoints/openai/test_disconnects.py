# SPDX-License-Identifier: Apache-2.0
"""Client aborts, full queues, deadlines and dead stages: the server continues, and nothing leaks. It ends if the
pipeline has ended on an error of its own."""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from vllm.entrypoints.launchers.launcher import terminate_if_errored

from tests.entrypoints.fake_pipelines import WRITER, fake_prompt, is_idle, running, set_deadline, submissions
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.entrypoints.openai.media_apps import use
from tests.entrypoints.openai.small_apps import send
from tests.orchestrator.pipelines import FAR
from tests.orchestrator.test_failure import wait_until
from tests.orchestrator.test_own_errors import fail
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.errors import PipelineClosedError, PipelineFullError

LONG = {"fake_tokens": 100_000, "fake_seconds": 0.01, "fake_only": "writer"}
QUICK: dict[str, Any] = {"stream": False, "options": {"text": "hello"}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), max_inflight=2, max_queued=2) as llm:
        yield llm


def question(*, stream: bool = False, **options: Any) -> dict[str, Any]:
    return {"stream": stream, "options": options}


async def check_it_serves(server: FakeServer) -> None:
    request = AppRequest(server.app, "/v1/generate", QUICK)
    assert await request.end() == {"text": "hello>writer>speaker"}
    assert request.status == 200


def test_a_client_abort_before_the_answer_frees_everything(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def main() -> None:
        with submissions(llm) as submitted:
            request = AppRequest(server.app, "/v1/generate", question(**LONG))
            assert await asyncio.to_thread(submitted.wait, 60)
        await request.disconnect()
        assert is_idle(llm)
        await check_it_serves(server)

    asyncio.run(main())


def test_a_client_abort_of_a_stream_frees_everything(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def main() -> None:
        request = AppRequest(server.app, "/v1/generate", question(stream=True, **LONG))
        await request.first_chunk()
        # `is_idle` would block the event loop, and so end the wait for the next segment, in which clients disconnect.
        assert request.status == 200 and any(llm._pipeline.orchestrator.activity().values())
        await request.disconnect()
        assert is_idle(llm)
        await check_it_serves(server)

    asyncio.run(main())


def test_a_request_has_its_place_from_when_it_came(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def answer(prepared: asyncio.Event, fails: bool = False) -> str:
        with RequestContext.start().answering():
            server.client.check_admission()
            await prepared.wait()
            server.client.check_admission()  # Several steps of an endpoint check.
            if fails:
                raise ValueError("the request is wrong")
            events = server.client.run(fake_prompt(text="hello"), stream=False)
            return [event async for event in events][-1].outputs[-1].outputs[0].text

    async def main() -> None:
        prepared, ready = asyncio.Event(), asyncio.Event()
        ready.set()
        first = [asyncio.create_task(answer(prepared, fails=i == 3)) for i in range(4)]
        await asyncio.sleep(0)  # Each of them waits to be prepared.
        with pytest.raises(PipelineFullError):
            await asyncio.create_task(answer(ready))
        request = AppRequest(server.app, "/v1/generate", QUICK)
        await request.end()
        assert request.status == 429
        prepared.set()
        *texts, error = await asyncio.gather(*first, return_exceptions=True)
        assert texts == ["hello>writer>speaker"] * 3 and isinstance(error, ValueError)
        assert await asyncio.gather(*(asyncio.create_task(answer(ready)) for _ in range(4))) == [*texts, texts[0]]
        await check_it_serves(server)

    asyncio.run(main())


def test_client_aborts_at_any_moment_free_everything(server: FakeServer, llm: AsyncOmniLLM) -> None:
    rng = random.Random(0)

    async def abort_one() -> None:
        request = AppRequest(server.app, "/v1/generate", question(stream=rng.random() < 0.5, **LONG))
        await asyncio.sleep(rng.random() * 0.1)
        await request.disconnect()

    async def main() -> None:
        for _ in range(5):
            await asyncio.gather(*(abort_one() for _ in range(8)))
        assert is_idle(llm)
        await check_it_serves(server)

    asyncio.run(main())


def has_room(llm: AsyncOmniLLM) -> bool:
    try:
        llm.check_room()
    except PipelineFullError:
        return False
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_beyond_the_queue_is_answered_with_a_retry_time(
    server: FakeServer, llm: AsyncOmniLLM, stream: bool
) -> None:
    async def main() -> None:
        first = AppRequest(server.app, "/v1/generate", question(stream=True, **LONG))
        await first.first_chunk()
        waiting = [AppRequest(server.app, "/v1/generate", QUICK) for _ in range(3)]
        while has_room(llm):
            await asyncio.sleep(0)
        late = AppRequest(server.app, "/v1/generate", question(stream=stream))
        answer = await late.end()
        assert (late.status, answer["error"]["code"]) == (429, 429)
        assert int(late.headers["retry-after"]) >= 1
        await first.disconnect()
        for request in waiting:
            assert await request.end() == {"text": "hello>writer>speaker"}
        await check_it_serves(server)

    asyncio.run(main())


def test_a_failed_request_does_not_affect_the_next(server: FakeServer) -> None:
    async def main() -> None:
        request = AppRequest(server.app, "/v1/generate", question(fake_fail="speaker"))
        answer = await request.end()
        assert (request.status, answer["error"]["code"]) == (500, 500)
        assert "fails (fake_fail)" not in answer["error"]["message"]
        await check_it_serves(server)

    asyncio.run(main())


@pytest.fixture
def may_restart(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A dead stage restarts once this is set."""
    may_restart = threading.Event()
    launcher = llm._pipeline.orchestrator._launcher
    launch = launcher.launch

    def launch_when_set(*args: Any) -> Any:
        may_restart.wait()
        return launch(*args)

    monkeypatch.setattr(launcher, "launch", launch_when_set)
    yield may_restart
    may_restart.set()


def test_a_dead_stage_fails_its_requests_and_health_until_it_has_restarted(
    server: FakeServer, may_restart: threading.Event
) -> None:
    async def health() -> tuple[int, dict[str, Any]]:
        request = AppRequest(server.app, "/health")
        answer = await request.end()
        ping = AppRequest(server.app, "/ping")
        await ping.end()
        assert answer["status"] == {200: "ok", 503: "unavailable"}[request.status]
        return request.status, {stage["name"]: stage["status"] for stage in answer["stages"]}

    async def main() -> None:
        assert await health() == (200, {"writer": "ready", "speaker": "ready"})
        request = AppRequest(server.app, "/v1/generate", question(fake_die="speaker"))
        while (await health())[0] == 200:
            await asyncio.sleep(0.01)  # There is nothing to be woken by.
        assert await health() == (503, {"writer": "ready", "speaker": "restarting"})
        may_restart.set()
        answer = await request.end()
        assert (request.status, answer["error"]["code"]) == (500, 500)
        assert request.headers["x-should-retry"] == "false" and "retry-after" not in request.headers
        # It waits for the stage, which restarts.
        await check_it_serves(server)
        assert await health() == (200, {"writer": "ready", "speaker": "ready"})

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/readyz", "/v1/models", "/metrics", "/v1/pipeline"])
def test_head_is_answered_as_get_without_the_body(server: FakeServer, path: str) -> None:
    head, get = (send(server.app, method, path) for method in ("HEAD", "GET"))
    assert head.status_code == get.status_code == 200
    assert head.content == b"" and head.headers["content-type"] == get.headers["content-type"]
    assert send(server.app, "HEAD", "/v1/chat/completions").status_code == 405


def test_models_are_retrieved_by_name(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--served-model-name", "org/model", "short").app

    async def main(client: openai.AsyncOpenAI) -> None:
        for listed in (await client.models.list()).data:
            found = await client.models.retrieve(listed.id)
            assert (found.id, found.object, found.owned_by) == (listed.id, "model", listed.owned_by)
        with pytest.raises(openai.NotFoundError, match="this server has org/model, short"):
            await client.models.retrieve("org/other")

    use(app, main)


def test_a_request_beyond_its_deadline_is_answered_with_504(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(server: FakeServer) -> None:
        request = AppRequest(server.app, "/v1/generate", question(**LONG))
        answer = await request.end()
        assert (request.status, answer["error"]["code"]) == (504, 504)
        assert "retry-after" not in request.headers
        request = AppRequest(server.app, "/v1/generate", QUICK)
        assert await request.end() == {"text": "hello>writer"}

    with running(AsyncOmniLLM, tmp_path, (WRITER,), request_timeout_s=0.5) as llm:
        set_deadline(llm, monkeypatch, QUICK["options"]["text"], None)
        asyncio.run(main(FakeServer(llm)))
        assert is_idle(llm)


def test_a_shutdown_refuses_new_requests_and_finishes_running_ones(tmp_path: Path) -> None:
    async def main(server: FakeServer) -> None:
        running = AppRequest(server.app, "/v1/generate", question(fake_tokens=30, fake_seconds=0.02, stream=True))
        await running.first_chunk()
        ending = asyncio.create_task(asyncio.to_thread(server.client.shutdown))
        late = AppRequest(server.app, "/v1/generate", QUICK)
        while await late.end() == {"text": "hello>writer"}:
            late = AppRequest(server.app, "/v1/generate", QUICK)  # The other thread had not started.
        assert late.status == 503
        await ending
        await asyncio.wait([running._task])
        assert b"".join(running.chunks).decode() == "".join(f"{i} " for i in range(30))
        health = AppRequest(server.app, "/health")
        await health.end()
        assert health.status == 503

    with running(AsyncOmniLLM, tmp_path, (WRITER,)) as llm:
        asyncio.run(main(FakeServer(llm, shutdown_timeout=60)))


def test_a_shutdown_without_timeout_aborts_running_requests(tmp_path: Path) -> None:
    async def main(server: FakeServer) -> None:
        with submissions(server.client.llm) as submitted:
            request = AppRequest(server.app, "/v1/generate", question(**LONG))
            assert await asyncio.to_thread(submitted.wait, 60)
        await asyncio.to_thread(server.client.shutdown)
        answer = await request.end()
        assert (request.status, answer["error"]["code"]) == (503, 503)

    with running(AsyncOmniLLM, tmp_path, (WRITER,)) as llm:
        asyncio.run(main(FakeServer(llm)))


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
