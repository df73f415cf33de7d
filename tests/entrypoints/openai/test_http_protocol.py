# SPDX-License-Identifier: Apache-2.0
"""What leaves the web server, and when: the headers of answers, and the lines of the access log."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import websockets.sync.client
from fastapi import WebSocket
from fastapi.responses import StreamingResponse

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.small_apps import make_app
from vllm_omni.entrypoints.openai.http_protocol import HeadersTransport, LateLogger, _watched, http_protocol

END = b"\r\n\r\n"
HEADERS = b"HTTP/1.1 200 OK" + END


class RecordedTransport:
    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def close(self) -> None:
        self.events.append("closed")

    def get_write_buffer_size(self) -> int:
        return 7


def make_transport() -> tuple[HeadersTransport, list[bytes | str]]:
    transport = RecordedTransport()
    return HeadersTransport(cast(Any, transport), asyncio.get_running_loop()), transport.events


def test_headers_are_sent_with_what_follows_them() -> None:
    async def answer() -> list[bytes | str]:
        transport, sent = make_transport()
        assert transport.get_write_buffer_size() == 7
        for body in (b"a", b"b"):  # Two answers of one connection.
            transport.write(HEADERS)
            assert sent[-1:] != [HEADERS]
            transport.write(body)
            transport.write(b"more")
        await asyncio.sleep(0)
        return sent

    assert asyncio.run(answer()) == [HEADERS + b"a", b"more", HEADERS + b"b", b"more"]


def test_headers_that_nothing_follows_are_sent_after_the_iteration() -> None:
    async def answer() -> list[bytes | str]:
        transport, sent = make_transport()
        transport.write(HEADERS)
        await asyncio.sleep(0)
        assert sent == [HEADERS]
        transport.write(b"a")
        transport.write(HEADERS)
        transport.write(HEADERS)  # None are lost.
        transport.close()
        await asyncio.sleep(0)
        return sent

    assert asyncio.run(answer()) == [HEADERS, b"a", HEADERS + HEADERS, "closed"]


def test_headers_alone_are_sent_before_the_connection_is_closed() -> None:
    async def answer() -> list[bytes | str]:
        transport, sent = make_transport()
        transport.write(HEADERS)
        transport.close()
        await asyncio.sleep(0)
        return sent

    assert asyncio.run(answer()) == [HEADERS, "closed"]


def test_a_line_of_the_log_is_written_after_the_iteration_but_not_of_a_poll(caplog: pytest.LogCaptureFixture) -> None:
    async def answer() -> None:
        with caplog.at_level(logging.INFO, "test.access"):
            logger = LateLogger(
                logging.getLogger("test.access"), asyncio.get_running_loop(), lambda method, path: path != "/poll"
            )
            for path, status in (("/a?b", 200), ("/poll?b", 200), ("/poll", 503)):
                logger.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", status)
            assert not caplog.messages
            await asyncio.sleep(0)

    asyncio.run(answer())
    assert caplog.messages == ['1.2.3.4:5 - "GET /a?b HTTP/1.1" 200', '1.2.3.4:5 - "GET /poll HTTP/1.1" 503']


class WatchedBase:
    """A protocol of uvicorn's whose client has these bytes to read; its timer is called by hand."""

    client = ("127.0.0.1", 1)

    def __init__(self, server: socket.socket) -> None:
        self.unread, self.is_closed, self.timers = 5000, False, list[tuple[float, Callable[..., None], int]]()
        self.transport = SimpleNamespace(
            get_write_buffer_size=lambda: self.unread,
            get_extra_info=lambda _: server,
            abort=lambda: setattr(self, "is_closed", True),
        )
        self.loop = SimpleNamespace(call_later=lambda *timer: self.timers.append(timer))

    def pause_writing(self) -> None:
        pass

    def read(self, num_bytes: int) -> bool:
        """Whether the connection is closed after the timer of a client that has read so many bytes."""
        self.unread -= num_bytes
        delay, check, most = self.timers.pop()
        assert delay == 10
        check(most)
        return self.is_closed


@pytest.mark.parametrize(("min_rate", "fewest"), [(0, 1), (100, 1000)])
def test_a_client_has_to_read_with_a_rate(min_rate: int, fewest: int) -> None:
    with socket.socket() as server:
        protocol = _watched(WatchedBase, 10, min_rate)(server)
        protocol.pause_writing()
        assert not protocol.read(fewest) and not protocol.read(fewest)
        assert protocol.read(fewest - 1) and not protocol.timers


def test_answers_over_http() -> None:
    app = make_app()
    has_headers = asyncio.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        await has_headers.wait()  # Of the client: the headers do not wait for the first part.
        yield b"part"

    @app.get("/slow")
    async def slow() -> StreamingResponse:
        return StreamingResponse(parts())

    @app.get("/go")
    async def go() -> str:
        has_headers.set()
        return "gone"

    with (
        over_http(app, http=http_protocol(60)) as url,
        httpx.Client(base_url=url) as client,
        client.stream("GET", "/slow") as answer,
    ):
        assert answer.status_code == 200
        for _ in range(2):  # On one connection.
            assert client.get("/go").json() == "gone"
        assert answer.read() == b"part"


def answer_to(url: str, request: bytes) -> bytes:
    """All bytes of the answer to one request, until the server closes the connection."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_requests_of_other_versions_over_http() -> None:
    app = make_app()

    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"one "
        yield b"two"

    @app.get("/parts")
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    @app.websocket("/v1/echo")
    async def session(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")

    post = (
        b"POST /v1/echo HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nContent-Length: 13\r\n"
        b'%s\r\n\r\n{"text": "a"}'
    )
    with over_http(app, http=http_protocol(60)) as url:
        for offer in (b"h2c", b"websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA=="):
            head, _, body = answer_to(url, post % (b"Connection: Upgrade, close\r\nUpgrade: " + offer)).partition(END)
            assert head.startswith(b"HTTP/1.1 200") and body.startswith(b'{"text":"a"'), (head, body)
        with websockets.sync.client.connect(f"{url.replace('http', 'ws')}/v1/echo") as connection:
            assert connection.recv() == "hello"
        head, _, body = answer_to(url, b"GET /parts HTTP/1.0\r\n\r\n").partition(END)
        assert b"chunked" not in head and body == b"one two"
        assert httpx.get(f"{url}/parts").text == "one two"
