# SPDX-License-Identifier: Apache-2.0
"""One request of the fuzzer as bytes, and its outcome. Knows no endpoint."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

ANSWER_LIMIT_S = 240.0
ABORTED = "aborted"
CLOSED = "closed"
NO_ANSWER = "no answer"


@dataclass(frozen=True)
class FuzzRequest:
    """
    Attributes:
        what: What is wrong with it, for the summary.
        must_fail: Only 4xx is right; else a successful answer is right, too.
        cut: Send only this number of bytes, and close the connection.
        abort_after_s: Close the connection after this number of seconds.
    """

    what: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    must_fail: bool = True
    cut: int | None = None
    abort_after_s: float | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.method} {self.path.partition('?')[0]}"

    @property
    def wire(self) -> bytes:
        headers = {"Host": "127.0.0.1", "Connection": "close", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        status: The HTTP status, `ABORTED` (by the client), `CLOSED` (by the server) or `NO_ANSWER` (in time).
        fault: Why the outcome is wrong; empty if it is right.
    """

    request: FuzzRequest
    status: int | str
    body: bytes = b""

    @property
    def fault(self) -> str:
        if isinstance(self.status, str):
            is_fine = self.status == ABORTED or (self.status == CLOSED and self.request.cut is not None)
        elif self.request.must_fail:
            is_fine = 400 <= self.status < 500
        else:
            is_fine = self.status < 500
        if is_fine:
            return ""
        sent = self.request.body[:600]
        return f"{self.status} for {self.request.endpoint} ({self.request.what}): {self.body[:300]!r}; sent: {sent!r}"


def post_json(what: str, path: str, body: Any, **kwargs: Any) -> FuzzRequest:
    content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    return FuzzRequest(what, "POST", path, content, {"Content-Type": "application/json"}, **kwargs)


async def send(port: int, request: FuzzRequest) -> Outcome:
    """Sends a request, up to its cut, and reads the whole answer.

    Raises:
        OSError: The server accepts no connections.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    try:
        limit = ANSWER_LIMIT_S if request.abort_after_s is None else request.abort_after_s
        await asyncio.wait_for(_exchange(reader, writer, request, answer), limit)
    except TimeoutError:
        if request.abort_after_s is None:
            return Outcome(request, NO_ANSWER, bytes(answer[:300]))
        return Outcome(request, _status(answer) if _is_error(answer) else ABORTED, _body(answer))
    finally:
        writer.transport.abort()
    return Outcome(request, _status(answer), _body(answer))


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: FuzzRequest, answer: bytearray
) -> None:
    # A server may answer and close before it has read all; its answer counts.
    with contextlib.suppress(ConnectionError):
        writer.write(request.wire[: request.cut])
        if request.cut is not None:
            await writer.drain()
            return
        while data := await reader.read(1 << 16):
            answer += data


def _is_error(answer: bytearray) -> bool:
    return answer[9:10] == b"5"


def _status(answer: bytearray) -> int | str:
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else CLOSED


def _body(answer: bytearray) -> bytes:
    return bytes(answer).partition(b"\r\n\r\n")[2]
