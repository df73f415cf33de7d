# SPDX-License-Identifier: Apache-2.0
"""The least that one can do to read streamed answers over HTTP: bytes are kept with the time at which they came, and
are taken apart when the load is over, so that the client takes no time from what is measured.

A process of its own runs it (`python http_client.py` is not for people). Knows no pipeline.
"""

import asyncio
import base64
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve_parts.loads import Answer, Load, Session, drive

TIMEOUT_S = 300.0


@dataclass
class Exchange:
    """One request, as it went over the wire.

    Attributes:
        pieces: Seconds since it was sent, and the bytes that came then.
    """

    question: int
    completed: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


class _Reader(asyncio.Protocol):
    """One connection for one request, which the server closes at the end of the answer."""

    def __init__(self, request: bytes, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._exchange.pieces.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def exchange(port: int, request: bytes, question: int, timeout: float = TIMEOUT_S) -> Exchange:
    """Sends a request and keeps what comes back until the server closes the connection."""
    result, started = Exchange(question), time.monotonic()
    try:
        transport, reader = await asyncio.get_running_loop().create_connection(
            lambda: _Reader(request, result), "127.0.0.1", port
        )
        try:
            await asyncio.wait_for(reader.closed, timeout)
        finally:
            transport.close()
    except (OSError, asyncio.TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.completed = time.monotonic() - started
    result.pieces = [(when - started, data) for when, data in result.pieces]
    return result


def post(path: str, body: dict[str, Any]) -> bytes:
    """A whole HTTP request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def read_answer(exchange: Exchange, endpoint: str, keeps_speech: bool = False) -> Answer:
    """Takes apart what came. A status that is no success, a stream that ends early or tells of an error: `error`."""
    answer = Answer(exchange.question, completed=exchange.completed, error=exchange.error)
    if not answer.error:
        try:
            answer.hear(_READERS[endpoint](exchange, answer), keeps_speech)
        except (ValueError, KeyError, IndexError) as error:
            answer.error = f"{type(error).__name__}: {error}"
    return answer


def _read_chat(exchange: Exchange, answer: Answer) -> bytes:
    pcm: list[bytes] = []
    is_done = False
    for when, event in _events(_body(exchange)):
        if event == b"[DONE]":
            is_done = True
            continue
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                answer.first_text = answer.first_text or when
                answer.text += delta["content"]
            if (delta.get("audio") or {}).get("data"):
                answer.first_audio = answer.first_audio or when
                pcm.append(base64.b64decode(delta["audio"]["data"]))
    if not is_done:
        raise ValueError("the stream ended early")
    return b"".join(pcm)


def _read_pcm(exchange: Exchange, answer: Answer) -> bytes:
    body = [(when, data) for when, data in _body(exchange) if data]
    if body:
        answer.first_audio = body[0][0]
    return b"".join(data for _, data in body)


def _read_images(exchange: Exchange, answer: Answer) -> bytes:
    for picture in json.loads(b"".join(data for _, data in _body(exchange)))["data"]:
        base64.b64decode(picture["b64_json"], validate=True)
    return b""


_READERS = {"chat": _read_chat, "text": _read_chat, "speech": _read_pcm, "images": _read_images}


def _body(exchange: Exchange) -> list[tuple[float, bytes]]:
    """The body's pieces, each with the time at which its last byte came.

    Raises:
        ValueError: It is not whole, or says that the request failed.
    """
    received = b"".join(data for _, data in exchange.pieces)
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError((head[9:12] + b" " + body[:300]).decode(errors="replace").strip() or "no answer")
    clock = _Clock(exchange.pieces)
    start = len(head) + 4
    headers = head.lower()
    if b"transfer-encoding: chunked" in headers:
        return _chunks(received, start, clock)
    length = int(headers.partition(b"content-length:")[2].split(b"\r\n")[0])
    if len(body) != length:
        raise ValueError(f"the body has {len(body)} bytes, not {length}")
    return [(clock.when(start + length), body)]


def _chunks(received: bytes, at: int, clock: "_Clock") -> list[tuple[float, bytes]]:
    pieces = []
    while True:
        line_end = received.index(b"\r\n", at)  # ValueError: the answer was cut
        size = int(received[at:line_end], 16)
        if size == 0:
            return pieces
        at = line_end + 2 + size
        pieces.append((clock.when(at), received[line_end + 2 : at]))
        at += 2


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of server-sent events, which may lie across pieces and several in one."""
    events, rest = [], b""
    for when, data in pieces:
        *lines, rest = (rest + data).split(b"\n\n")
        events += [(when, line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
    return events


class _Clock:
    """When the first so many bytes were there. Asked for rising numbers."""

    def __init__(self, pieces: list[tuple[float, bytes]]) -> None:
        self._pieces = iter(pieces)
        self._num_bytes, self._when = 0, 0.0

    def when(self, num_bytes: int) -> float:
        while self._num_bytes < num_bytes:
            self._when, data = next(self._pieces, (self._when, b"\0" * num_bytes))
            self._num_bytes += len(data)
        return self._when


def serve_loads(connection: Connection, port: int, server_pid: int, requests: dict[str, list[bytes]]) -> None:
    """The process: takes loads, gives sessions, until the other end is closed."""
    while True:
        try:
            load: Load = connection.recv()
        except EOFError:
            return
        connection.send(asyncio.run(_run(load, port, server_pid, requests[load.endpoint])))


async def _run(load: Load, port: int, server_pid: int, requests: list[bytes]) -> Session:
    async def call(number: int) -> Exchange:
        question = number % len(requests)
        return await exchange(port, requests[question], question)

    cpu = cpu_seconds(server_pid)
    seconds, exchanges = await drive(load, call)
    cpu = cpu_seconds(server_pid) - cpu
    return Session(seconds, [read_answer(each, load.endpoint, load.keeps_speech) for each in exchanges], cpu)


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, without its children; Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # USER_HZ is 100 on every Linux that Python runs on
