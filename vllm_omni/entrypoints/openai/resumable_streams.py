# SPDX-License-Identifier: Apache-2.0
"""Streamed answers that a client reads on after it has lost its connection: `GET /v1/streams/{id}`, with
`--resumable-streams`.

The request of an answer stays in the call of the connection that it came over, also when that is lost, so all that it
holds stays counted. What it sends goes into a `Stream`, from which this connection reads, and those that resume. Knows
no endpoint: an answer is streamed if it has no length.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from operator import attrgetter
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError, describe_errors
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget, SessionShare
from vllm_omni.entrypoints.openai.request_context import SCOPE_KEY, RequestContext
from vllm_omni.entrypoints.openai.server_args import MIB
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE
from vllm_omni.errors import PipelineFullError

PATH = "/v1/streams/{stream_id}"

KEEP_S = 60.0
"""How long a stream without a reader is kept. If it has not ended by then, its request is aborted."""

WINDOW_BYTES = 16 * MIB
"""What is kept of a stream that was read: more than is on the way to a client. As much is made while nobody reads."""

_STREAM_BYTES, _PART_BYTES = 4096, 160
"""What a stream, and each of its parts, takes beside the bytes that are sent."""


class Part(NamedTuple):
    """An event, a comment or a piece of a file; `position` is that of its end: the number of events, or bytes."""

    data: bytes
    position: int

    @property
    def num_bytes(self) -> int:
        return len(self.data) + _PART_BYTES


class Stream:
    """One answer, as its endpoint makes it and connections read it.

    Attributes:
        id: Names it.
        client: See `RequestContext`.
        owner: Who may read it.
        num_readers: Connections that read it.
        has_ended: Nothing follows.
        lost: Set when nobody will read it on: its request ends as if its client had disconnected.
    """

    def __init__(
        self, context: RequestContext, start: Message, share: SessionShare, streams: dict[str, Stream]
    ) -> None:
        """
        Args:
            context: Of its request.
            start: The message with its status and headers.
            share: Counts what it holds.
            streams: Those that are kept, by their ids: it adds itself.
        """
        self.id = f"stream-{secrets.token_hex(16)}"
        self.client, self.owner = context.client, context.owner
        self.num_readers, self.has_ended, self.lost = 0, False, asyncio.Event()
        self._share, self._streams = share, streams
        self._start = {**start, "headers": [*start["headers"], (b"x-stream-id", self.id.encode())]}
        self._is_sse = Headers(raw=start["headers"]).get("content-type", "").startswith(MEDIA_TYPE)
        self._is_complete = False
        self._window = WINDOW_BYTES  # 0: it is not kept.
        self._parts: deque[Part] = deque()
        self._num_dropped = self._num_read = 0  # Parts.
        self._read_bytes = self._unread_bytes = 0
        self._position = self._first_position = 0
        self._incomplete_event = b""
        self._changed = asyncio.Event()  # Wakes those who wait now.
        self._timer: asyncio.TimerHandle | None = None
        streams[self.id] = self

    async def add(self, data: bytes, *, is_last: bool) -> None:
        """Adds what the endpoint sends. Returns when it has been read; while nobody reads, when there is room for
        more."""
        for part in self._cut(data, is_last):
            self._parts.append(part)
            self._unread_bytes += part.num_bytes
        self._is_complete = is_last
        self._count()
        self._wake()
        while self._unread_bytes > (0 if self.num_readers else self._window) and not self.lost.is_set():
            await self._changed.wait()

    def _cut(self, data: bytes, is_last: bool) -> Iterator[Part]:
        if not self._is_sse:
            self._position += len(data)
            if data:
                yield Part(bytes(data), self._position)
            return
        *events, self._incomplete_event = (self._incomplete_event + data).split(b"\n\n")
        for event in events:
            if b"data:" in event:  # Else it is a comment.
                self._position += 1
                event = b"id: %d\n%b" % (self._position, event)
            yield Part(event + b"\n\n", self._position)
        if is_last and self._incomplete_event:
            yield Part(self._incomplete_event, self._position)

    def end(self) -> None:
        """The endpoint has ended. If it was not complete, connections that read it are closed."""
        self.has_ended = True
        self._wake()
        if not self.num_readers:
            self._wait_for_reader()

    def find(self, position: int) -> tuple[int, int]:
        """Where a position is: the number of a part, and how many of its bytes are before it.

        Raises:
            OmniHTTPError: It was not made yet, or is not kept any more.
        """
        unit = "events" if self._is_sse else "bytes"
        if position > self._position:
            message = f"{self.id} has {self._position} {unit} so far; it cannot go on after {position}"
            raise OmniHTTPError(message, HTTPStatus.BAD_REQUEST)
        if position < self._first_position:
            message = f"{self.id} has dropped its first {self._first_position} {unit}; it cannot go on after {position}"
            raise OmniHTTPError(message, HTTPStatus.GONE)
        index = bisect_right(self._parts, position, key=attrgetter("position"))
        skipped = 0
        if not self._is_sse and index < len(self._parts):
            skipped = position - (self._parts[index].position - len(self._parts[index].data))
        return self._num_dropped + index, skipped

    def is_at_end(self, number: int) -> bool:
        """Whether it is complete, and has no part of this number."""
        return self._is_complete and number == self._num_made

    @property
    def _num_made(self) -> int:
        return self._num_dropped + len(self._parts)

    async def read(self, receive: Receive, send: Send, number: int = 0, skipped: int = 0) -> None:
        """Sends the answer from a place, see `find`, until its end, or until the client disconnects. Who reads so
        slowly that the next part is not kept any more is left without the rest."""
        self.num_readers += 1
        self._stop_timer()
        sending = asyncio.create_task(self._send(send, number, skipped))
        leaving = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            sending.cancel()
            leaving.cancel()
            self.num_readers -= 1
            if not self.num_readers:
                self._wait_for_reader()
                self._wake()

    async def _send(self, send: Send, number: int, skipped: int) -> None:
        with suppress(OSError):  # The client has disconnected.
            await send({**self._start, "headers": [*self._start["headers"]]})  # Other middleware adds to it.
            while not self.is_at_end(number):
                if self._num_dropped <= number < self._num_made:
                    data = self._parts[number - self._num_dropped].data
                    await send({"type": "http.response.body", "body": data[skipped:], "more_body": True})
                    number, skipped = number + 1, 0
                    self._note_read(number)
                elif self._num_made <= number and not self.has_ended:
                    await self._changed.wait()
                else:
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note_read(self, number: int) -> None:
        """Somebody has read all parts before this one."""
        while self._num_read < number:
            num_bytes = self._parts[self._num_read - self._num_dropped].num_bytes
            self._num_read += 1
            self._unread_bytes -= num_bytes
            self._read_bytes += num_bytes
        self._count()
        self._wake()

    def _wait_for_reader(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(KEEP_S if self._window else 0, self.forget)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        """Drops what need not be kept, and has the rest counted."""
        while self._num_dropped < self._num_read and self._read_bytes - self._parts[0].num_bytes >= self._window:
            part = self._parts.popleft()
            self._num_dropped += 1
            self._first_position = part.position
            self._read_bytes -= part.num_bytes
        if self._window:
            try:
                self._share.set(_STREAM_BYTES + self._read_bytes + self._unread_bytes)
            except PipelineFullError:
                self.forget()

    def forget(self) -> None:
        """Nobody can resume it any more. Those who read it do so to its end; when there are none, it is lost."""
        self._streams.pop(self.id, None)
        self._stop_timer()  # It holds this.
        self._window = 0
        self._share.release()
        self._count()
        if not self.num_readers:
            self.lost.set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ResumableStreams:
    """The streams of a server that can be resumed."""

    def __init__(self, budget: SessionBudget) -> None:
        """`budget`: Counts what they hold. Those that have ended make room in it."""
        self._budget = budget
        self._streams: dict[str, Stream] = {}
        budget.make_room = self.make_room

    def start(self, context: RequestContext, message: Message) -> Stream:
        """A stream for the answer of a request, that begins with this message."""
        return Stream(context, message, self._budget.share(context.client), self._streams)

    def find(self, stream_id: str, owner: bytes) -> Stream:
        """
        Raises:
            OmniHTTPError: There is none of this owner.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.owner != owner:
            message = (
                f"there is no stream {stream_id[:100]!r} of this API key; one is kept for {KEEP_S:g} s after it has "
                "ended, or its client has disconnected, while there is room"
            )
            raise OmniHTTPError(message, HTTPStatus.NOT_FOUND)
        return stream

    def make_room(self, client: bytes | str | None) -> bool:
        """Forgets the oldest stream that has ended and that nobody reads: of a client, or (None) of all. Returns
        whether there was one."""
        for stream in self._streams.values():
            if stream.has_ended and not stream.num_readers and client in (None, stream.client):
                stream.forget()
                return True
        return False


class ResumableMiddleware:
    """Lets a streamed answer go on when its client disconnects, for `KEEP_S`."""

    def __init__(self, app: ASGIApp, streams: ResumableStreams) -> None:
        self.app, self._streams = app, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        answer = _Answer(self._streams, scope[SCOPE_KEY], receive, send)
        try:
            await self.app(scope, answer.receive, answer.send)
        finally:
            await answer.end()


class _Answer:
    """The answer to one request. If it is streamed, it goes through a stream to the connection."""

    def __init__(self, streams: ResumableStreams, context: RequestContext, receive: Receive, send: Send) -> None:
        self._streams, self._context, self._receive, self._send = streams, context, receive, send
        self._stream: Stream | None = None

    async def send(self, message: Message) -> None:
        if self._stream is not None:
            await self._stream.add(message.get("body", b""), is_last=not message.get("more_body", False))
        elif message["type"] == "http.response.start" and _is_streamed(message):
            self._stream = self._streams.start(self._context, message)
            self._reading = asyncio.create_task(self._stream.read(self._receive, self._send))
        else:
            await self._send(message)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and self._stream is not None:
            await self._stream.lost.wait()
        return message

    async def end(self) -> None:
        """Returns when the connection has all of it, or is lost."""
        if self._stream is not None:
            self._stream.end()
            await self._reading


def _is_streamed(message: Message) -> bool:
    return message["status"] == HTTPStatus.OK and "content-length" not in Headers(raw=message["headers"])


class _Resumed(Response):
    """The rest of a stream."""

    def __init__(self, stream: Stream, number: int, skipped: int) -> None:
        super().__init__()
        self._stream, self._place = stream, (number, skipped)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream.read(receive, send, *self._place)


router = APIRouter()
_ERRORS = describe_errors(HTTPStatus.UNAUTHORIZED, HTTPStatus.GONE)


@router.get(
    PATH,
    response_class=Response,
    responses={**_ERRORS, HTTPStatus.NO_CONTENT.value: {"description": "It is complete, and nothing is missing."}},
)
async def resume_stream(
    stream_id: str,
    raw_request: Request,
    starting_after: Annotated[int, Query(ge=0, description="How many events, or bytes, were received.")] = 0,
    last_event_id: Annotated[
        int | None, Header(ge=0, description="The `id` of the last event that was received, in its place.")
    ] = None,
) -> Response:
    """What a client has not received of a streamed answer, whose id is in its header `X-Stream-Id`, and what still
    comes."""
    stream = _find(raw_request, stream_id)
    number, skipped = stream.find(starting_after if last_event_id is None else last_event_id)
    if stream.is_at_end(number):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return _Resumed(stream, number, skipped)


@router.delete(PATH, status_code=HTTPStatus.NO_CONTENT, response_class=Response, responses=_ERRORS)
async def delete_stream(stream_id: str, raw_request: Request) -> Response:
    """A streamed answer is not kept any more: its request is aborted when no connection reads it, or now."""
    _find(raw_request, stream_id).forget()
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _find(raw_request: Request, stream_id: str) -> Stream:
    streams: ResumableStreams = raw_request.app.state.omni_streams
    return streams.find(stream_id, RequestContext.of(raw_request).owner)
