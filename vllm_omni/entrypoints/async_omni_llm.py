# SPDX-License-Identifier: Apache-2.0
"""Online inference with a pipeline of stages: concurrent requests on one event loop."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.entrypoints.operations import AsyncOperations
from vllm_omni.entrypoints.withheld_methods import OF_ASYNC_LLM
from vllm_omni.errors import PipelineClosedError
from vllm_omni.metrics.stats import SpeculationCounts

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm.lora.request import LoRARequest

    from vllm_omni.entrypoints.request_builder import StageSamplingParams
    from vllm_omni.entrypoints.text_input import TextInput
    from vllm_omni.events import OmniEvent
    from vllm_omni.inputs import OmniPrompt
    from vllm_omni.orchestrator.request import PipelineRequest


class AsyncOmniLLM(AsyncOperations, OmniBase):
    """A pipeline of stages, each an engine in its own process.

    The constructor blocks until the pipeline is ready: call it before the event loop runs, or in a thread.

        async for event in llm.generate("Tell me a joke."):
            ...
    """

    _vllm_class = "AsyncLLM"
    _withheld_methods = OF_ASYNC_LLM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `OmniLLM`."""
        super().__init__(*args, **kwargs)
        # One thread: tokenizers and processors are not thread-safe.
        self._preprocessing = ThreadPoolExecutor(1, thread_name_prefix="omni-preprocessing")
        self._num_preprocessing = 0
        self._places: set[Place] = set()
        self._delivery: EventDelivery | None = None

    def _delivery_to(self, loop: asyncio.AbstractEventLoop) -> EventDelivery:
        if self._delivery is None or self._delivery.loop is not loop:
            self._delivery = EventDelivery(loop)
        return self._delivery

    async def generate(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams = None,
        request_id: str | None = None,
        *,
        stream: bool = True,
        keep_outputs: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        request_fields: Mapping[str, Any] | None = None,
        priority: int = 0,
        on_accepted: Callable[[], None] | None = None,
        release_when_sent: Callable[[Callable[[], None]], None] | None = None,
        place: Place | None = None,
        count_unread: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one prompt as they occur; the last one is a `CompletedEvent` or an `ErrorEvent`.

        Leaving the loop early, closing the generator, or cancelling the task aborts the request.

        Args:
            prompt: A string or a dict (see `OmniPrompt`). Its text may be an async iterator of strings, for a model
                that reads a text in pieces: speech begins with the first of them. The iterator may end before it is
                exhausted; what it raises ends the request, and is raised here.
            sampling_params_list: As for `OmniLLM.generate`.
            request_id: The caller's id, for events and errors; need not be unique. Default: a number.
            stream: Yield segments of the output as they are made; otherwise only the last event.
            keep_outputs: As for `OmniLLM.generate`.
            trace_headers: W3C trace context of the caller (`traceparent`, ...).
            lora_request: As for `OmniLLM.generate`.
            request_fields: Fields of vLLM's `EngineCoreRequest` for the stages that read the prompt.
            priority: As for `OmniLLM.generate`.
            on_accepted: Called, on the event loop, when the pipeline has accepted the request, which may then wait for
                admission.
            release_when_sent: Called at the end with a function that makes room for another request, to be called when
                the outputs have left this process. Default: there is room when the caller has received the last event.
            place: Of `reserve`. Default: a new one.
            count_unread: Called with the bytes of the events that the caller has not taken, when these change. What it
                raises aborts the request, and is raised here in their place.

        Raises:
            InvalidRequestError: The prompt or a parameter is wrong.
            PipelineFullError: The queue is full; has the time after which to retry.
            PipelineClosedError: `close()` was called.
        """
        loop = asyncio.get_running_loop()
        orchestrator = self._pipeline.orchestrator
        delivery = self._delivery_to(loop)
        events = EventQueue(count_unread)
        text = await self._begin_text(prompt, request_id)
        internal_id: str

        def on_event(event: OmniEvent) -> None:
            try:
                delivery.put(events, event)
            except RuntimeError:  # The loop was closed while this generator was open.
                orchestrator.cancel([internal_id])

        events.on_refusal = lambda: orchestrator.cancel([internal_id])

        def build() -> PipelineRequest:
            if not self.is_open:  # It may have been closed while the prompt waited for the thread.
                raise PipelineClosedError("the pipeline was closed before the prompt was preprocessed")
            return self._pipeline.builder.build(
                prompt,
                sampling_params_list,
                on_event,
                request_id=request_id,
                streams=stream,
                keep_outputs=keep_outputs,
                trace_headers=trace_headers,
                lora_request=lora_request,
                request_fields=request_fields,
                priority=priority,
                text=text,
            )

        with place or self.reserve():
            if self._num_preprocessing or not self.builder.is_quick(prompt, sampling_params_list):
                request = await self._preprocess(build)
            else:  # A thread would take longer to begin than this takes.
                request = build()
            internal_id = request.request_id  # `on_event` must not refer to `request`, which holds it and all media.
            orchestrator.submit(request, wait=False)
        feeding = None if text is None else asyncio.ensure_future(self._feed(text, request, events))
        try:
            if on_accepted is not None:
                on_accepted()
            while not (event := await events.get()).is_terminal:
                yield event
        except BaseException:  # The caller closed the generator, or was cancelled.
            orchestrator.cancel([request.request_id])
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
            events.close()
        release = functools.partial(orchestrator.release, internal_id)
        release() if release_when_sent is None else release_when_sent(release)
        yield event

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Aborts requests, running or waiting; they end with `RequestAbortedError`.

        Args:
            request_ids: The callers' ids; default: all requests.

        Returns:
            How many.
        """
        wanted = None if request_ids is None else set(request_ids)
        return await asyncio.wrap_future(self._pipeline.orchestrator.abort_external(wanted))

    async def check_prompt(self, prompt: str | OmniPrompt) -> None:
        """Makes the request of a prompt, and does not run it.

        Raises:
            InvalidRequestError, PipelineFullError, PipelineClosedError: As `generate`.
        """
        with self.reserve():
            await self._preprocess(lambda: self._pipeline.builder.build(prompt, None, on_event=lambda _: None))

    async def _begin_text(self, prompt: str | OmniPrompt, request_id: str | None) -> TextInput | None:
        """The text of a prompt that arrives in pieces, with its beginning; None for any other prompt."""
        if not isinstance(prompt, Mapping) or not isinstance(text := prompt.get("prompt"), AsyncIterable):
            return None
        from vllm_omni.entrypoints.text_input import TextInput

        self.check_room()
        loop = asyncio.get_running_loop()
        begun = TextInput(
            self.builder.prompt_processors,
            self.builder.lock,
            prompt,
            text,
            request_id,
            lambda work: loop.run_in_executor(self._preprocessing, work),
        )
        await begun.begin()
        return begun

    async def _feed(self, text: TextInput, request: PipelineRequest, events: EventQueue) -> None:
        """Sends the rest of the text to its stage. An error goes to the reader of the events."""
        try:
            await text.feed(functools.partial(self._pipeline.orchestrator.extend, request))
        except Exception as error:
            events.put(error)

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises the errors that `generate` would raise for any prompt of so many sequences.

        Raises:
            PipelineFullError: The queue is full.
            PipelineClosedError: `close()` was called.
        """
        self._pipeline.orchestrator.check_room(self._num_coming, num_sequences)

    @property
    def _num_coming(self) -> int:
        return sum(place.num_sequences for place in self._places)

    def would_wait(self) -> bool:
        """Whether a further request would wait: for its admission, or behind others in a stage.

        Raises:
            PipelineClosedError: `close()` was called.
        """
        return self._pipeline.orchestrator.would_wait(self._num_coming)

    def watch_speculations(self, counts: SpeculationCounts) -> None:
        """Shows the counts of a server's realtime sessions in the metrics of the pipeline."""
        self._pipeline.orchestrator.watch_speculations(counts)

    def reserve(self, num_sequences: int = 1) -> Place:
        """Takes a place in the queue for a request that is still to be made. So requests have their places in the order
        in which they came, however long each takes to be made.

        Raises:
            PipelineFullError, PipelineClosedError: As `check_room`.
        """
        self.check_room(num_sequences)
        return Place(self._places, num_sequences)

    async def _preprocess(self, build: Callable[[], PipelineRequest]) -> PipelineRequest:
        """Runs `build` in the preprocessing thread."""
        self._num_preprocessing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._preprocessing, build)
        finally:
            self._num_preprocessing -= 1

    def close(self) -> None:
        """Ends all stages. Running requests end with an `ErrorEvent`. May be called twice."""
        super().close()
        self._preprocessing.shutdown(wait=False)


class Place:
    """A place in a queue, that is free again at the end of a `with` block or by `release`. For the event loop."""

    def __init__(self, taken: set[Place], num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self._taken = taken
        taken.add(self)

    def release(self) -> None:
        """May be called twice."""
        self._taken.discard(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class EventQueue:
    """The events of one request that its reader has not taken. Belongs to the event loop.

    A reader that is slower than the model gets several segments of its text as one: what it does for each is done once.

    Attributes:
        on_refusal: Called when `count` has refused an event.
    """

    def __init__(self, count: Callable[[int], None] | None = None) -> None:
        """
        Args:
            count: Called with the bytes of the events when these change. What it raises is raised by `get` in place of
                all of them; later ones are dropped.
        """
        self._events: deque[OmniEvent | BaseException] = deque()
        self._has_events = asyncio.Event()
        self._num_taken = 0
        self._count, self._num_bytes, self._is_closed = count, 0, False
        self.on_refusal: Callable[[], None] | None = None

    def put(self, event: OmniEvent | BaseException) -> None:
        """`event`: `get` raises an exception."""
        if self._is_closed:
            return
        last = self._events[-1] if self._events else None
        if last is not None and not isinstance(last, BaseException) and not isinstance(event, BaseException):
            merged = last.merge(event)
            if merged is not None:
                self._events[-1] = merged
                self._add_bytes(merged, last)
                return
        self._events.append(event)
        self._has_events.set()
        self._add_bytes(event)

    def _add_bytes(self, event: OmniEvent | BaseException, before: OmniEvent | None = None) -> None:
        """Counts an event; `before`: that which it replaces."""
        if self._count is None or isinstance(event, BaseException):
            return
        self._num_bytes += event.num_bytes - (0 if before is None else before.num_bytes)
        try:
            self._count(self._num_bytes)
        except Exception as error:
            self.close()
            self._events.append(error)
            self._has_events.set()
            if self.on_refusal is not None:
                self.on_refusal()

    def close(self) -> None:
        """Drops the events, and those that come later."""
        self._events.clear()
        if self._count is not None:
            self._count(0)
        self._is_closed = True

    async def get(self) -> OmniEvent:
        while not self._events:
            self._has_events.clear()
            await self._has_events.wait()
        event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        if self._count is not None:
            self._num_bytes -= event.num_bytes
            self._count(self._num_bytes)
        event.sequence = self._num_taken  # The reader counts what it gets.
        self._num_taken += 1
        return event


class EventDelivery:
    """Puts events into queues of a loop, from any thread; wakes the loop once for all that it has not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[EventQueue, OmniEvent]] = deque()
        self._is_woken = False  # The loop will read `_events` anyway.

    def put(self, queue: EventQueue, event: OmniEvent) -> None:
        """
        Raises:
            RuntimeError: The loop is closed.
        """
        self._events.append((queue, event))
        if not self._is_woken or self.loop.is_closed():  # It may have been closed before it read them.
            self._is_woken = True  # Before the loop is woken, which may deliver at once.
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._is_woken = False
                raise

    def _deliver(self) -> None:
        self._is_woken = False  # Before the events are taken: later ones wake the loop again.
        while self._events:
            queue, event = self._events.popleft()
            queue.put(event)
