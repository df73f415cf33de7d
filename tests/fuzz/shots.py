# SPDX-License-Identifier: Apache-2.0
"""One request of a fuzzer, put on the wire byte by byte, and what came back. Knows no endpoint."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

ANSWER_LIMIT_S = 120.0
LEFT = "left"
CLOSED = "closed"
NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Shot:
    """
    Attributes:
        what: What is wrong with it, for the summary.
        must_fail: Nothing but 4xx will do; else it may also be answered well.
        cut: Send only so many bytes, and close the connection.
        leaves_after: Close the connection after so many seconds, whatever has come.
    """

    what: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    must_fail: bool = True
    cut: int | None = None
    leaves_after: float | None = None

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
        status: The HTTP status, or `LEFT` (we closed), `CLOSED` (the server did, unasked) or `NO_ANSWER` (it hangs).
        fault: Why this is not right; empty if it is.
    """

    shot: Shot
    status: int | str
    body: bytes = b""

    @property
    def fault(self) -> str:
        if isinstance(self.status, str):
            is_fine = self.status == LEFT or (self.status == CLOSED and self.shot.cut is not None)
        elif self.shot.must_fail:
            is_fine = 400 <= self.status < 500
        else:
            is_fine = self.status < 500
        if is_fine:
            return ""
        sent = self.shot.body[:600]
        return f"{self.status} for {self.shot.endpoint} ({self.shot.what}): {self.body[:300]!r}; sent: {sent!r}"


def post_json(what: str, path: str, body: Any, **kwargs: Any) -> Shot:
    content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    return Shot(what, "POST", path, content, {"Content-Type": "application/json"}, **kwargs)


async def fire(port: int, shot: Shot) -> Outcome:
    """Sends it, as far as it goes, and reads the answer to its end.

    Raises:
        OSError: The server takes no connections.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    try:
        limit = ANSWER_LIMIT_S if shot.leaves_after is None else shot.leaves_after
        await asyncio.wait_for(_exchange(reader, writer, shot, answer), limit)
    except asyncio.TimeoutError:
        if shot.leaves_after is None:
            return Outcome(shot, NO_ANSWER, bytes(answer[:300]))
        return Outcome(shot, _status(answer) if _is_error(answer) else LEFT, _body(answer))
    finally:
        writer.transport.abort()
    return Outcome(shot, _status(answer), _body(answer))


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shot: Shot, answer: bytearray) -> None:
    # A server may answer, and close, before it has read all: what it said counts.
    with contextlib.suppress(ConnectionError):
        writer.write(shot.wire[: shot.cut])
        if shot.cut is not None:
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
