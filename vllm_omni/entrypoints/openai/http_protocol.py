# SPDX-License-Identifier: Apache-2.0
"""How answers leave the web server: uvicorn's protocol, with what ours adds to it. Knows no endpoint."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from vllm_omni.entrypoints.openai.request_context import SCOPE_KEY, RequestContext
from vllm_omni.entrypoints.openai.server_args import flag

logger = logging.getLogger("vllm.omni.server")

_Protocol: Any = H11Protocol  # mypy takes no base class that is not typed
"""uvicorn's in Python. That in C loses the body of a request with `Upgrade: h2c`, which Java's client sends, and sends
chunks to clients of HTTP/1.0; it takes 80 us less of a request, and 3 us of a chunk."""
_WebSocketProtocol: Any = WebSocketsSansIOProtocol


def http_protocol(send_timeout_s: float, min_rate: int = 0) -> type[asyncio.Protocol]:
    """uvicorn's protocol, that closes the connection of a client that has read nothing for `send_timeout_s`, or less
    than `min_rate` bytes a second."""

    class Protocol(_watched(_Protocol, send_timeout_s, min_rate)):  # type: ignore[misc]
        def _should_upgrade(self) -> bool:
            """Only to a WebSocket, which begins with GET. Any other offer may be ignored."""
            offered: bytes | None = self._get_upgrade()
            return self.scope["method"] == "GET" and offered == b"websocket" and self._should_upgrade_to_ws()

    return Protocol


def web_socket_protocol(send_timeout_s: float, min_rate: int = 0) -> type[asyncio.Protocol]:
    """uvicorn's protocol, whose messages wait until the system has all of those before, and that closes the connection
    as `http_protocol`. Its context counts what has come and was not taken, see `RequestContext`."""

    class Protocol(_watched(_WebSocketProtocol, send_timeout_s, min_rate)):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.num_arriving = 0
            transport.set_write_buffer_limits(high=0)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.queue.empty():
                num_arriving = len(self.conn.reader.buffer) + sum(map(len, self.frames))
            else:
                num_arriving = self.num_arriving + len(data)
            try:
                self._count(num_arriving)
            except Exception as error:
                logger.warning("the connection of a realtime client is closed: %s", error)
                self.transport.abort()
                self.frames.clear()
                self._count(0)  # Now: the client's other sessions are not to be refused for it.

        async def receive(self) -> Any:
            message = await super().receive()
            if self.queue.empty():
                self._count(0)
            return message

        def _count(self, num_arriving: int) -> None:
            context: RequestContext | None = getattr(self, "scope", {}).get(SCOPE_KEY)
            if context is not None and context.count_arriving is not None:
                self.num_arriving = num_arriving
                context.count_arriving(num_arriving)

        def handle_ping(self) -> None:
            """Drops the answer while others wait: a client that reads none would have them all kept."""
            if self.writable.is_set():
                super().handle_ping()
            else:
                self.conn.data_to_send()

        def handle_cont(self, event: Any) -> None:
            """Joins the parts of a message as they come: millions of small ones would take fifty times their bytes."""
            if event.fin:
                super().handle_cont(event)
                return
            if isinstance(self.frames[0], bytes):
                self.frames[0] = bytearray(self.frames[0])
            self.frames[0] += event.data

    return Protocol


def _watched(base: Any, send_timeout_s: float, min_rate: int) -> Any:
    """One of uvicorn's protocols, that closes the connection of a client that reads too little of what waits for it."""
    min_bytes = max(1, round(min_rate * send_timeout_s))

    class Protocol(base):
        transport: asyncio.Transport
        _check: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            self._end_watch()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_watch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            most = _unread_bytes(self.transport) - min_bytes
            self._check = self.loop.call_later(send_timeout_s, self._compare, most)

        def _compare(self, most: int) -> None:
            if _unread_bytes(self.transport) <= most:
                self._watch()
                return
            logger.warning(
                "a client (%s) has read less than %d bytes in %g s (%s): its connection is closed",
                self.client[0] if self.client else "unknown", min_bytes, send_timeout_s, flag("send_timeout_s"),
            )  # fmt: skip
            self.transport.abort()

        def _end_watch(self) -> None:
            if self._check is not None:
                self._check.cancel()

    return Protocol


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client's system has not taken: the transport's, and those of the system here, which takes more
    from the transport only when a third of its own, up to megabytes, has left."""
    num_bytes: int = transport.get_write_buffer_size()
    with suppress(OSError):  # Not every system counts them.
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        num_bytes += struct.unpack("i", queued)[0]
    return num_bytes
