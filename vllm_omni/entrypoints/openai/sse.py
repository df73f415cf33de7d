# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: the lines of streamed answers. Knows no endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import msgspec
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError, error_body, to_http_error
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.errors import OmniError

Line: TypeAlias = str | bytes
"""One event, or a comment, with the blank line behind it. vLLM's are strings."""

Data = dict[str, Any]

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
"""The last line of a chat."""


STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Of streamed answers: proxies pass on each part when it comes, and keep none."""


class ErrorLine(Exception):
    """vLLM ended a stream with an error; the argument is its line, decoded."""


class ClosingResponse(StreamingResponse):
    """Closes its generator when it ends for any reason, which aborts the request at once."""

    def __init__(
        self,
        parts: AsyncGenerator[Any, None],
        media_type: str,
        headers: Mapping[str, str],
        context: RequestContext | None = None,
    ) -> None:
        """`context`: The headers wait until each of its requests to the engine has an output: an error before it has an
        HTTP status. All else is ready by then, so that the first token does not wait for it."""
        super().__init__(parts, headers={**STREAM_HEADERS, **headers}, media_type=media_type)
        self._parts, self._context = parts, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        if self._context is not None:
            await self._context.started()
        await super().stream_response(send)


def defer_headers(response: Response, context: RequestContext) -> Response:
    """An answer of vLLM's route, whose headers wait for the context's requests if it is a stream."""
    if not isinstance(response, StreamingResponse):
        return response
    parts: Any = response.body_iterator
    deferred = ClosingResponse(parts, MEDIA_TYPE, response.headers, context)
    deferred.background = response.background  # It counts the load.
    return deferred


def sse_response(
    lines: AsyncGenerator[Line, None], keep_alive_s: float, headers: Mapping[str, str] | None = None
) -> ClosingResponse:
    """The answer that sends the lines, see `with_error`.

    Args:
        keep_alive_s: Seconds without a line after which a comment is sent; 0: none is.
    """
    vllm_lines = cast(AsyncGenerator[str, None], with_error(lines))
    return ClosingResponse(with_sse_keep_alive(vllm_lines, keep_alive_s), MEDIA_TYPE, headers or {})


async def with_error(lines: AsyncGenerator[Line, None], event: str = "error") -> AsyncGenerator[Line, None]:
    """The lines. An error of the pipeline, or of a stream of vLLM's, is the last of them.

    Args:
        event: The error's type of event; empty: it has none.
    """
    try:
        async with aclosing(lines):
            async for line in lines:
                yield line
    except ErrorLine as error:
        yield sse_line(error.args[0], event)
    except (OmniError, OmniHTTPError) as error:
        yield sse_line(error_body(to_http_error(error)).model_dump(mode="json"), event)


def sse_line(data: Mapping[str, Any], event: str = "") -> bytes:
    """One event.

    Args:
        data: Its JSON; bytes in it become base64.
        event: Its type; empty: it has none.
    """
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"


def comment_line(text: str) -> bytes:
    """A line that clients skip."""
    return f": {text}\n\n".encode()


def read_line(line: str) -> Data:
    """The data of an event of vLLM's."""
    return msgspec.json.decode(line[len("data: ") :])


def read_chunk(line: str) -> Data | None:
    """The data of a line of vLLM's; None: it is the mark of the end.

    Raises:
        ErrorLine: The stream ended with an error.
    """
    if not line.startswith("data: {"):
        return None
    chunk = read_line(line)
    if "error" in chunk:
        raise ErrorLine(chunk)
    return chunk
