# SPDX-License-Identifier: Apache-2.0
"""Lines of server-sent events: written, and ended by an error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from http import HTTPStatus

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Message

from tests.entrypoints.openai.small_apps import make_app, send
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext
from vllm_omni.entrypoints.openai.sse import (
    ErrorLine,
    Line,
    comment_line,
    defer_headers,
    sse_line,
    sse_response,
    with_error,
)
from vllm_omni.errors import RequestTimeoutError

FAILED = {"error": {"message": "it failed", "code": 500}}


async def stream(*lines: Line, error: Exception | None = None) -> AsyncGenerator[Line, None]:
    for line in lines:
        yield line
    if error is not None:
        raise error


async def collected(lines: AsyncGenerator[Line, None]) -> list[Line]:
    return [line async for line in lines]


def test_bytes_are_base64_and_a_type_comes_first() -> None:
    assert sse_line({"audio": b"abc"}) == b'data: {"audio":"YWJj"}\n\n'
    assert sse_line({"a": 1}, "made") == b'event: made\ndata: {"a":1}\n\n'
    assert comment_line("step 1") == b": step 1\n\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OmniHTTPError("broken audio", HTTPStatus.INTERNAL_SERVER_ERROR), "broken audio"),
        (RequestTimeoutError("too late", request_id="r"), "too late"),
        (ErrorLine(FAILED), "it failed"),
    ],
)
def test_an_error_is_the_last_line(error: Exception, message: str) -> None:
    first, last = asyncio.run(collected(with_error(stream(b"data: {}\n\n", error=error))))
    assert first == b"data: {}\n\n" and isinstance(last, bytes) and last.startswith(b"event: error\ndata: ")
    assert message in json.loads(last.partition(b"data: ")[2])["error"]["message"]

    (only,) = asyncio.run(collected(with_error(stream(error=error), event="")))
    assert only == last.removeprefix(b"event: error\n")


def test_a_defect_is_not_an_answer() -> None:
    with pytest.raises(KeyError):
        asyncio.run(collected(with_error(stream(error=KeyError("a")))))


def late_app(outputs: AsyncGenerator[Line, None]) -> FastAPI:
    """`/v1/late` streams the outputs of one request to the engine."""
    app = make_app()

    @app.get("/v1/late")
    async def endpoint(request: Request) -> Response:
        context = RequestContext.of(request)
        context.outputs.append(PrefetchedStream(outputs))
        return defer_headers(StreamingResponse(context.outputs[0]), context)

    return app


def test_a_late_response_has_the_status_of_an_early_error_and_every_output() -> None:
    refused = OmniHTTPError("the queue is full", HTTPStatus.TOO_MANY_REQUESTS, retry_after_s=2)
    answer = send(late_app(stream(error=refused)), "GET", "/v1/late")
    assert answer.status_code == HTTPStatus.TOO_MANY_REQUESTS and answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["message"] == "the queue is full"

    answer = send(late_app(stream("a", "b")), "GET", "/v1/late")
    assert answer.status_code == HTTPStatus.OK and answer.text == "ab"


def test_proxies_pass_on_each_part_of_a_stream_and_keep_none() -> None:
    app = late_app(stream("a"))

    @app.get("/v1/lines")
    async def endpoint() -> Response:
        return sse_response(stream("a"), 0, {"X-Own": "1"})

    for path in ("/v1/late", "/v1/lines"):
        headers = send(app, "GET", path).headers
        assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")
    assert headers["x-own"] == "1"


def test_a_client_that_leaves_before_a_late_response_begins_closes_its_request() -> None:
    is_waiting, is_closed = asyncio.Event(), asyncio.Event()
    sent: list[Message] = []

    async def waiting() -> AsyncGenerator[Line, None]:
        is_waiting.set()
        try:
            await asyncio.Event().wait()
            yield ""
        finally:
            is_closed.set()

    async def receive() -> Message:
        await is_waiting.wait()
        return {"type": "http.disconnect"}

    async def send_message(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/late", "headers": [], "query_string": b""}
        await asyncio.wait_for(late_app(waiting())(scope, receive, send_message), timeout=10)

    asyncio.run(main())
    assert is_closed.is_set() and not sent
