# SPDX-License-Identifier: Apache-2.0
"""The server of a pipeline of fake stages, in this process, and a client that can disconnect at any moment."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from tests.entrypoints.fake_pipelines import fake_prompt
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.server_process import limit_kernel_buffer
from vllm_omni.entrypoints.openai.sse import ClosingResponse
from vllm_omni.events import ARSegmentEvent, CompletedEvent


class AskRequest(BaseModel):
    """A request: what the fake stages do."""

    stream: bool = False
    options: dict[str, Any] = {}


class FakeServer:
    """The application, with an endpoint `/v1/generate` whose requests set what the fake stages do."""

    def __init__(self, llm: AsyncOmniLLM, *flags: str, shutdown_timeout: float = 0) -> None:
        args = OmniServeCommand().parse(["fake", *flags]).args
        self.client = OmniEngineClient(llm, shutdown_timeout=shutdown_timeout)
        self.app: FastAPI = asyncio.run(build_omni_app(self.client, args))

        @self.app.post("/v1/generate")
        @with_cancellation
        @load_aware_call
        async def answer(question: AskRequest, raw_request: Request) -> Any:
            events = self._answer(question)
            if question.stream:
                first = await anext(events)  # An error before it has an HTTP status.
                return ClosingResponse(_all(first, events), "text/plain", {})
            return JSONResponse({"text": [text async for text in events][-1]})

    async def _answer(self, question: AskRequest) -> AsyncGenerator[str, None]:
        async with aclosing(self.client.run(fake_prompt(**question.options), stream=question.stream)) as events:
            async for event in events:
                if isinstance(event, ARSegmentEvent) and question.stream:
                    yield event.text
                elif isinstance(event, CompletedEvent) and not question.stream:
                    yield event.outputs[-1].outputs[0].text


class _Server(uvicorn.Server):
    """Ends when `end` is called, and its connections have: uvicorn asks only every 0.1 s, and then waits as long."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end: Future[None] = Future()

    def end(self) -> None:
        """For any thread."""
        self._end.set_result(None)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await asyncio.wrap_future(self._end)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for connections and requests as long as uvicorn does; those that still run are cancelled."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(10):
            if not (self.server_state.connections or self.server_state.tasks):
                return
            await asyncio.sleep(0.01)


@contextmanager
def over_http(app: FastAPI, **options: Any) -> Iterator[str]:
    """Serves an application in a thread; yields its URL. `options` are uvicorn's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limit_kernel_buffer(listener)
        server = _Server(uvicorn.Config(app, lifespan="off", log_level="critical", **options))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end()
            thread.join()


async def _all(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for text in rest:
            yield text


class AppRequest:
    """One request, as a web server passes it to an application."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`method`: GET without a body, POST with one, if it is not given."""
        self._app = app
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                *((name.lower().encode(), value.encode()) for name, value in (headers or {}).items()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._content = b"" if body is None else json.dumps(body).encode()
        self._is_sent = False
        self._disconnected = asyncio.Event()
        self._got_chunk = asyncio.Event()
        self.chunks: list[bytes] = []
        self.status, self.is_complete = 0, False
        self.headers: dict[str, str] = {}
        self._task = asyncio.create_task(self._app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._disconnected.is_set():
            raise OSError("the client has disconnected")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.is_complete = not message.get("more_body", False)
            if message.get("body"):
                self.chunks.append(message["body"])
                self._got_chunk.set()

    async def first_chunk(self) -> None:
        await self._got_chunk.wait()

    def drop(self) -> None:
        """Disconnects."""
        self._disconnected.set()

    async def disconnect(self) -> None:
        """Disconnects; returns when the application has handled it."""
        self.drop()
        await asyncio.gather(self._task, return_exceptions=True)  # There is no client for errors.
        await settled()

    async def end(self) -> dict[str, Any]:
        """The whole answer."""
        await asyncio.wait([self._task])
        return json.loads(b"".join(self.chunks))


async def settled() -> None:
    """Waits until the generators of aborted requests are closed."""
    await asyncio.sleep(0)  # The event loop makes a task for each generator that was dropped.
    closing = [task for task in asyncio.all_tasks() if type(task.get_coro()).__name__ == "async_generator_athrow"]
    if closing:
        await asyncio.wait(closing)
