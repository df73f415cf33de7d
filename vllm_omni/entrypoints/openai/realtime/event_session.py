# SPDX-License-Identifier: Apache-2.0
"""A WebSocket whose client sends JSON events, and what bounds it: its messages, its memory, its time and its reader.

Knows no event, and not what a session does. `Sessions` admits them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.exceptions import VLLMNotFoundError

from vllm_omni.entrypoints.openai.http_errors import error_response, to_http_error
from vllm_omni.entrypoints.openai.realtime.client_secrets import SUBPROTOCOL
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id, read_event
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget
from vllm_omni.entrypoints.openai.request_context import RequestContext, end
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits, ServerLimits, flag, limits_from
from vllm_omni.errors import OmniError, PipelineFullError

logger = logging.getLogger("vllm.omni.server")

Handler = Callable[[Any], Awaitable[None]]

_EXPIRED, _IDLE, _FAILED = 1001, 1000, 1011  # WebSocket close codes.
_RETRY_S = 10


class Sessions:
    """The sessions of one server, of every kind.

    Attributes:
        limits: Of them.
        budget: Counts what they hold.
        send_timeout_s: How long an event may wait until the client has taken those before it.
    """

    def __init__(self, args: Namespace) -> None:
        self.limits = limits_from(args, RealtimeLimits)
        self.budget = SessionBudget(self.limits)
        self.send_timeout_s = limits_from(args, ServerLimits).send_timeout_s
        self._num_sessions: Counter[bytes | str] = Counter()

    async def serve(self, websocket: WebSocket, open: Callable[[WebSocket], Awaitable[EventSession]]) -> None:
        """Runs a session until it ends.

        Args:
            open: Makes it for a connection, that is accepted then. What it raises denies the connection.
        """
        client = RequestContext.of(websocket).client
        if (reason := self._is_full(client)) is not None:
            headers = {"Retry-After": str(_RETRY_S)}
            await deny(websocket, f"{reason}; try again later", HTTPStatus.TOO_MANY_REQUESTS, headers)
            return
        self._num_sessions[client] += 1
        try:
            session = await open(websocket)
        except VLLMNotFoundError as error:
            await deny(websocket, str(error), HTTPStatus.NOT_FOUND)
        except OmniError as error:
            answer = to_http_error(error)
            await deny(websocket, answer.message, answer.http_status, answer.headers)
        else:
            offered = websocket.scope.get("subprotocols", ())
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
            await session.run()
        finally:
            self._num_sessions -= Counter([client])

    def _is_full(self, client: bytes | str) -> str | None:
        """Why the client may not open a session."""
        limit, own = self.limits.max_realtime_sessions, self.limits.max_client_realtime_sessions
        if self._num_sessions.total() >= limit:
            return f"the server has {limit} sessions ({flag('max_realtime_sessions')})"
        if self._num_sessions[client] >= (own := own or -(-limit // 2)):
            return f"this key, or address, has {own} sessions ({flag('max_client_realtime_sessions')})"
        return None


async def deny(websocket: WebSocket, message: str, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
    """Answers a connection that was not accepted with an HTTP status."""
    await websocket.send_denial_response(error_response(message, status, headers))


class EventSession(ABC):
    """One session, from its first event to its end. `run` it once.

    Events are handled one after the other, in the order in which they came.

    Attributes:
        id: Its id.
    """

    _handlers: Mapping[str, Handler]
    _event_types: ClassVar[Mapping[str, type[BaseModel]] | None] = None
    """See `read_event`."""

    def __init__(self, websocket: WebSocket, sessions: Sessions) -> None:
        """`websocket`: A connection, accepted before the session runs."""
        self.id = new_id("sess")
        self._websocket, self._send_timeout_s = websocket, sessions.send_timeout_s
        self._client, self._limits = RequestContext.of(websocket), sessions.limits
        self._share = partial(sessions.budget.share, self._client.client)
        self._expires_at = time.time() + self._limits.max_realtime_session_s  # For the client: a clock may be set.
        self._deadline = time.monotonic() + self._limits.max_realtime_session_s
        self._event_share, self._arriving_share = self._share(), self._share()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: asyncio.Task[Any] | None = None
        self._ended_by: Literal["error", "unread event"] | None = None

    @abstractmethod
    def _session(self) -> Mapping[str, Any]:
        """The session, as its client sees it."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether it works although no event comes."""

    @abstractmethod
    def _release(self) -> None:
        """Drops what it holds, which refers to it in circles."""

    def _after_event(self) -> None:  # noqa: B027 (optional)
        """An event was handled, or refused."""

    async def run(self) -> None:
        """Handles events until the client disconnects or a limit is reached; aborts what still runs."""
        self._runner = asyncio.current_task()
        self._client.count_arriving = self._arriving_share.set
        try:
            await self._send("session.created", session=self._session())
            while (text := await self._receive()) is not None:
                await self._handle(text)
        except WebSocketDisconnect:
            pass
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            if self._ended_by == "error":
                await self._close(_FAILED, "internal error")
        finally:
            try:
                await self._abort()
            finally:
                self._client.count_arriving = None
                self._release()
                self._event_share.release()
                self._arriving_share.release()

    async def _receive(self) -> str | bytes | None:
        """The next message; None when the session has expired."""
        idle_s = self._limits.realtime_idle_timeout_s
        while (left_s := self._deadline - time.monotonic()) > 0:
            # In a task, so that other work has its turn between two messages that are there. `asyncio.wait_for` loses a
            # cancellation that comes beside a message.
            receiving = asyncio.create_task(self._websocket.receive())
            try:
                await asyncio.wait([receiving], timeout=min(idle_s, left_s))
            finally:
                await end(receiving)
            if receiving.cancelled():
                if left_s > idle_s and not self._is_busy():
                    await self._expire(f"no event for {idle_s:g} s ({flag('realtime_idle_timeout_s')})", _IDLE)
                    return None
                continue
            message = receiving.result()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            return message.get("text") or message.get("bytes") or ""
        await self._expire(f"it has lasted {self._limits.max_realtime_session_s:g} s, its limit", _EXPIRED)
        return None

    async def _expire(self, reason: str, code: int) -> None:
        await self._abort()
        await self._send_error(EventError(f"the session has ended: {reason}", code="session_expired"))
        await self._close(code, "session expired")

    async def _handle(self, text: str | bytes) -> None:
        try:
            self._event_share.set(len(text))
            event = read_event(text, self._limits.max_realtime_message_values, self._event_types)
        except EventError as error:
            await self._send_error(error)
        except PipelineFullError as error:
            await self._send_error(_full(error))
        else:
            await self._attempt(self._handlers[event.type](event), event.event_id)
        finally:
            self._event_share.release()
            self._after_event()

    async def _attempt(self, step: Awaitable[None], event_id: str | None) -> None:
        try:
            await step
        except (EventError, PipelineFullError) as error:
            refusal = error if isinstance(error, EventError) else _full(error)
            refusal.event_id = event_id
            await self._send_error(refusal)

    async def _send(self, event_type: str, **fields: Any) -> None:
        """Sends an event; it has the fields as they are now. Bytes become base64."""
        data = msgspec.json.encode({"type": event_type, "event_id": new_id("event"), **fields}).decode()
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._websocket.send_text(data)
        except TimeoutError as error:
            if asyncio.current_task() is not self._runner:
                self._end("unread event")
            raise WebSocketDisconnect(1006, "the client does not read") from error

    async def _close(self, code: int, reason: str) -> None:
        with suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(self._send_timeout_s):
                await self._websocket.close(code, reason)

    async def _send_error(self, error: EventError) -> None:
        await self._send("error", error={**error.as_dict(), "event_id": error.event_id})

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it in a task, until the session ends. One that fails ends the session, whose client would wait."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, WebSocketDisconnect):
            logger.error("a realtime session failed", exc_info=error)
            self._end("error")

    async def _abort(self) -> None:
        await asyncio.gather(*map(end, self._tasks))

    def _end(self, reason: Literal["error", "unread event"]) -> None:
        assert self._runner is not None
        self._ended_by = reason
        self._runner.cancel()


def _full(error: PipelineFullError) -> EventError:
    return EventError(str(error), code="memory_limit_exceeded")
