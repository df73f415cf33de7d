# SPDX-License-Identifier: Apache-2.0
"""Clients that send their request, or read their answer, slowly or not at all. Knows no endpoint.

An answer is given to the web server in pieces, so that what the client has not read waits here, as part of a request
that counts. The web server's protocol closes the connection of a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vllm_omni.entrypoints.openai.server_args import flag

logger = logging.getLogger("vllm.omni.server")

BODY_PATIENCE_S = 30.0
"""How long a body may be slower than its lowest rate."""

_PIECE_BYTES = 1 << 16

_Protocol: Any = AutoHTTPProtocol  # One of uvicorn's, by what is installed.


def in_pieces(send: Send) -> Send:
    """A `send` that returns when the web server holds no more than about a piece of what was sent."""

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _PIECE_BYTES:
            await send(message)
            return
        for start in range(0, len(body), _PIECE_BYTES):
            await send({**message, "body": bytes(body[start : start + _PIECE_BYTES]), "more_body": True})
        if not message.get("more_body", False):
            await send({**message, "body": b"", "more_body": False})  # waits for the last piece

    return send_pieces


def http_protocol(send_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, that closes the connection of a client that has read nothing for `send_timeout_s`."""

    class Protocol(_Protocol):
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
            unsent = self.transport.get_write_buffer_size()
            self._check = self.loop.call_later(send_timeout_s, self._compare, unsent)

        def _compare(self, unsent: int) -> None:
            if self.transport.get_write_buffer_size() < unsent:
                self._watch()
                return
            logger.warning(
                "a client (%s) has read nothing for %g s (%s): its connection is closed",
                self.client[0] if self.client else "unknown", send_timeout_s, flag("send_timeout_s"),
            )  # fmt: skip
            self.transport.abort()

        def _end_watch(self) -> None:
            if self._check is not None:
                self._check.cancel()

    return Protocol


class PatientReceive:
    """A `receive` that raises when a body comes more slowly than `min_rate` bytes a second for `BODY_PATIENCE_S`.

    Only the time counts in which the application waits for the client.
    """

    def __init__(self, receive: Receive, min_rate: int) -> None:
        self._receive = receive
        self._min_rate = min_rate
        self._left_s = BODY_PATIENCE_S
        self._is_complete = False

    async def __call__(self) -> Message:
        """
        Raises:
            HTTPException: The body is too slow.
        """
        if self._is_complete:  # It waits for a disconnect.
            return await self._receive()
        start = time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), self._left_s)
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body came more slowly than {self._min_rate} bytes a second for {BODY_PATIENCE_S:g} s; send it "
                f"faster, or lower {flag('min_body_rate')}",
                {"Connection": "close"},
            ) from None
        gained_s = len(message.get("body", b"")) / self._min_rate
        self._left_s = min(self._left_s - (time.monotonic() - start) + gained_s, BODY_PATIENCE_S)
        self._is_complete = not message.get("more_body", False)
        return message
