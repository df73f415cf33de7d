# SPDX-License-Identifier: Apache-2.0
"""The state of one HTTP request, in one object that goes with it from the middleware to the engine client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from starlette.requests import HTTPConnection
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMValidationError

from vllm_omni.engine.media_tokens import MediaTokens
from vllm_omni.entrypoints.openai.json_body import JsonBody
from vllm_omni.events import CompletedEvent
from vllm_omni.inputs import SpokenText

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni_llm import Place
    from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget

SCOPE_KEY = "omni_context"
"""Of the context in the ASGI scope."""

Item = TypeVar("Item")


class TooMuchMediaError(VLLMValidationError):
    """A request's media exceed a limit of one prompt, whose cost fewer would not reach."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request for text sets besides the fields that vLLM's handlers read.

    Attributes:
        modalities: The outputs that the pipeline makes for it.
        stage_params: For each stage, in stage order, its sampling parameters, or None for its defaults. Those of the
            stage that vLLM's handler samples are added to the handler's own.
        explicit_fields: Names of sampling parameters that the request sets in its own fields. They win over
            `stage_params`.
        prompt: Further keys of the prompt.
        shows_text: Whether the answer has the text. The text of speech alone is its transcript.
        audio_format: How speech is encoded.
        keeps_media: vLLM's handler gets the text alone, and `RequestContext.completed` the rest.
    """

    modalities: tuple[str, ...] = ("text",)
    stage_params: Sequence[Mapping[str, Any] | None] | None = None
    explicit_fields: frozenset[str] = frozenset()
    prompt: Mapping[str, Any] = field(default_factory=dict)
    shows_text: bool = True
    audio_format: str = "wav"
    keeps_media: bool = False

    @property
    def has_media(self) -> bool:
        return self.modalities != ("text",)


@dataclass(kw_only=True)
class RequestContext:
    """One HTTP request.

    The outermost middleware makes it, the endpoint sets its options. Who has the HTTP request has its context (`of`).
    vLLM loads media and calls the engine without the request, in tasks of its own, so these read it from a context
    variable (`current`).

    Attributes:
        json: The body, if it is JSON, until the endpoint takes it.
        owner: The SHA-256 of the API key that the request was sent with; empty where the server has no keys.
        address: That it came from.
        num_media_parts: Images, audio clips and videos that were loaded for it so far.
        kept_sounds: What decodes the sounds that a realtime session, or an endpoint, keeps, by their addresses in the
            messages; as `MediaFetcher.sound`.
        kept_files: The files of its images that were fetched, and the data URIs of others, likewise.
        is_preprocessed: Whether the model's processor has kept what it made of one of these, by its address: such a one
            is not decoded again.
        num_decoded_bytes: Of these when they are decoded, see `MediaBudget`.
        num_media_tokens: Of their images and videos in the prompt.
        media_tokens: Counts these; None: they are not for a prompt, or it is not known how they are read.
        reads_sound_in_video: Whether the model hears its videos; one without sound is silent to it.
        options: What it sets for the pipeline.
        outputs: Those of its requests to the engine, in the order of their submission.
        completed: The ends of its requests to the engine, if its options keep media.
        reads_deltas: Whether a chat is answered in `ChatDelta`s, not in lines.
        mm_token_counts: Tokens of the rendered prompt by type of media.
        num_cached_tokens: Tokens of the prompt that the engine found in its prefix cache, in a stream.
        spoken_text: Which part of the reply is spoken; None: all of it.
        fit_prompt: Makes the prompt of a chat that may be too long: called with the request and what renders one, and
            returns what that does.
        place: In the pipeline's queue, for its next request to the engine.
        budget: Counts the text and speech that was made for it and not read; None: nothing does.
        count_arriving: Called with the bytes of a WebSocket's messages that have come and were not taken, when these
            change; what it raises ends the connection.
    """

    json: JsonBody | None = None
    owner: bytes = b""
    address: str = ""
    num_media_parts: int = 0
    kept_sounds: Mapping[str, Callable[[], tuple[np.ndarray, float]]] = field(default_factory=dict)
    kept_files: Mapping[str, bytes | str] = field(default_factory=dict)
    is_preprocessed: Callable[[str], bool] = lambda address: False
    num_decoded_bytes: int = 0
    num_media_tokens: int = 0
    media_tokens: MediaTokens | None = None
    reads_sound_in_video: bool = False
    options: RequestOptions = RequestOptions()
    outputs: list[PrefetchedStream[Any]] = field(default_factory=list)
    completed: list[CompletedEvent] = field(default_factory=list)
    reads_deltas: bool = False
    mm_token_counts: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    spoken_text: SpokenText | None = None
    fit_prompt: Callable[[Any, Callable[[Any], Awaitable[Any]]], Awaitable[Any]] | None = None
    place: Place | None = None
    budget: SessionBudget | None = None
    count_arriving: Callable[[int], None] | None = None
    _release: Callable[[], None] | None = None  # None: there is no answer whose sending ends.

    @classmethod
    def start(cls, client: RequestContext | None = None) -> RequestContext:
        """Makes the context of a new HTTP request, for the current task and those that it creates.

        Args:
            client: Of an earlier request, whose client sends this one, too.
        """
        context = cls() if client is None else cls(owner=client.owner, address=client.address, budget=client.budget)
        _current.set(context)
        return context

    @property
    def client(self) -> bytes | str:
        """Whose limits count for it: its owner, or its address where there are no keys."""
        return self.owner or self.address

    @classmethod
    def of(cls, connection: HTTPConnection) -> RequestContext:
        """The context of an HTTP request, or of a WebSocket."""
        return connection.scope[SCOPE_KEY]

    @classmethod
    def current(cls) -> RequestContext:
        """The context of the HTTP request that this task works for; outside of one a context of its own."""
        return _current.get(None) or cls()

    def take_json(self) -> JsonBody | None:
        """The body, if it is JSON that nobody has taken. Who takes it decides how long it is held."""
        body, self.json = self.json, None
        return body

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While this block sends the answer, the request holds a slot of the pipeline, see `release_when_sent`."""
        self._release = _nothing
        try:
            yield
        finally:
            if place := self.take_place():
                place.release()
            release, self._release = self._release, None
            release()

    def restart_media(self) -> None:
        """Counts its media from zero, for another prompt."""
        self.num_media_parts = self.num_decoded_bytes = self.num_media_tokens = 0

    @property
    def is_answering(self) -> bool:
        """Whether this block runs."""
        return self._release is not None

    def take_place(self) -> Place | None:
        """The place, which the caller then releases."""
        place, self.place = self.place, None
        return place

    def release_when_sent(self, release: Callable[[], None]) -> None:
        """Has a slot of the pipeline released when the answer has been sent, or at once if there is none to send.

        One slot is enough for one answer: another one that was held before is released.
        """
        if self._release is not None:
            release, self._release = self._release, release
        release()

    async def started(self) -> None:
        """Waits until each request to the engine has its first output, so that earlier errors have an HTTP status.

        Raises:
            OmniHTTPError: One of them failed; the others are aborted.
        """
        try:
            if len(self.outputs) == 1:  # That of most: its first token does not wait for a task.
                await self.outputs[0].peek()
            else:
                await self._all_started()
        except BaseException:
            await self.abort()
            raise

    async def _all_started(self) -> None:
        peeks = [asyncio.create_task(outputs.peek()) for outputs in self.outputs]  # They start together.
        try:
            await asyncio.gather(*peeks)
        except BaseException:
            for peek in peeks:
                peek.cancel()
            await asyncio.gather(*peeks, return_exceptions=True)
            raise

    async def abort(self) -> None:
        """Ends its requests to the engine, if they have not ended."""
        for outputs in self.outputs:  # Not in tasks, which the cancellation of this one would end before they begin.
            await outputs.aclose()


def _nothing() -> None:
    pass


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for its end, also when it is cancelled itself."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


_current: ContextVar[RequestContext] = ContextVar("request_context")


class PrefetchedStream(AsyncGenerator[Item, None], Generic[Item]):
    """An async generator whose first item can be awaited before it is read. Closing it closes the generator."""

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        self._items = items
        self._peeked: list[Item] = []

    async def peek(self) -> None:
        """Waits for the first item.

        Raises:
            Exception: Whatever the generator raises before it.
        """
        with suppress(StopAsyncIteration):
            self._peeked.append(await anext(self._items))

    async def __anext__(self) -> Item:
        return self._peeked.pop() if self._peeked else await anext(self._items)

    async def asend(self, value: None) -> Item:
        return await self.__anext__()

    async def athrow(self, *error: Any) -> Item:
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        await self._items.aclose()


async def started(items: AsyncGenerator[Item, None]) -> PrefetchedStream[Item]:
    """Returns these items as soon as there is a first one: errors before it have an HTTP status."""
    stream = PrefetchedStream(items)
    await stream.peek()
    return stream


def model_route(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """What vLLM's own routes of models have: a request is counted as load, and ends when its client disconnects. Its
    body has been read before."""
    return with_cancellation(load_aware_call(handler))
