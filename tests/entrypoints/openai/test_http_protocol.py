# SPDX-License-Identifier: Apache-2.0
"""Clients that read too slowly, and requests of other versions of HTTP."""

import socket
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import httpx
import pytest
import websockets.sync.client
from fastapi import WebSocket
from fastapi.responses import StreamingResponse

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.small_apps import make_app
from vllm_omni.entrypoints.openai.http_protocol import _watched, http_protocol

END = b"\r\n\r\n"


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
