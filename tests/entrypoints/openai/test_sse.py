# SPDX-License-Identifier: Apache-2.0
"""Lines of server-sent events: written, and ended by an error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from http import HTTPStatus

import pytest

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.sse import ErrorLine, Line, comment_line, sse_line, with_error
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
