# SPDX-License-Identifier: Apache-2.0
"""Lines of server-sent events: written, ended by an error, and read."""

import asyncio
import json
from collections.abc import AsyncGenerator
from http import HTTPStatus

import pytest

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.request_context import Peekable, RequestContext
from vllm_omni.entrypoints.openai.sse import DONE, ErrorLine, Line, comment_line, read_deltas, sse_line, with_error
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


def test_a_chat_is_read_until_an_error_and_its_request_ends() -> None:
    async def main() -> None:
        is_closed = asyncio.Event()

        async def outputs() -> AsyncGenerator[int, None]:
            try:
                while True:
                    yield 0
            finally:
                is_closed.set()

        def line(delta: dict, **more: object) -> bytes:
            return sse_line({"choices": [{"delta": delta, "finish_reason": None}], **more})

        context = RequestContext(outputs=[Peekable(outputs())], mm_token_counts={"audio": 7})
        await context.started()
        usage = {"total_tokens": 3}
        call = {"index": 0, "id": "call"}
        ends = [
            sse_line({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            sse_line({"choices": [], "usage": usage}),
        ]
        lines = stream(
            line({"content": "é"}).decode(), comment_line("step"), line({"audio": {"id": "a", "data": b"abc"}}),
            line({"audio": {"expires_at": 1}, "tool_calls": [call]}), *ends, DONE, sse_line(FAILED),
        )  # fmt: skip
        deltas = []
        with pytest.raises(ErrorLine) as failure:
            async for delta in read_deltas(lines, context):
                deltas.append(delta)
        assert failure.value.args == (FAILED,) and is_closed.is_set()
        assert [delta.text for delta in deltas] == ["é", "", "", "", ""]
        assert [delta.audio for delta in deltas] == [b"", b"abc", b"", b"", b""]
        assert deltas[2].tool_calls == [call] and deltas[3].finish_reason == "stop" and deltas[4].usage == usage
        assert all(delta.mm_token_counts == {"audio": 7} for delta in deltas)

    asyncio.run(main())
