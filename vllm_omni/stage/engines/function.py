# SPDX-License-Identifier: Apache-2.0
"""Stages that compute in calls of Python: a function, a function for a batch, or a `FunctionStage`.

The engine's thread owns all state. It makes the calls of a plain function itself; those of a `FunctionStage` it passes,
one at a time of each request, to threads that report their end in the inbox.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import convert
from vllm_omni.core.urgency import Urgency
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import (
    AbortRequest,
    Error,
    NewRequest,
    Outbox,
    RequestItem,
    Result,
    StageEngine,
    Stream,
    StreamChunk,
)
from vllm_omni.stage.engines.playback import Playback, PlayingTime, playing_s
from vllm_omni.stage.watchdog import StepTimer

logger = get_logger(__name__)

WorkItem = NewRequest | StreamChunk
Sources = Mapping[int, StageOutput]

StageFunction = Callable[[StageRequest, Sources], "dict[str, Any] | Iterator[dict[str, Any]]"]
"""`function(request, sources) -> {name: value}`: tensors, plain values, and `text` for a text output.

Where an edge has a window size the function is called for each window (`sources[i].start`, `.context`, `.is_last`). A
generator streams: each dict that it yields is a piece of the output."""

StageBatchFunction = Callable[[Sequence[StageRequest], Sequence[Sources]], "Sequence[dict[str, Any] | Exception]"]
"""`function(requests, sources) -> [{name: value}, ...]`: the same for several requests at once; an exception in place
of a result fails only that request."""

_REQUESTS_PER_THREAD = 32
"""Requests that the engine holds: most of them wait for their next window."""


class PlainFunction(FunctionStage):
    """A `StageFunction` as a stage. It keeps nothing from one window to the next: the state is the request.

    Attributes:
        batch_size: Windows, of as many requests, that one call computes.
        streams: The function may be a generator of pieces.
        wrong_type: Says what a result of the wrong type should be.
    """

    batch_size = 1
    streams = True

    def __init__(self, stage: OmniStageConfig, model: str, function: Callable[..., Any] | None = None) -> None:
        """
        Args:
            function: In place of the one that the stage names.
        """
        super().__init__(stage, model)
        self.wrong_type = f"{stage.function} must return a dict"
        self._function = function

    def start(self) -> None:
        if self._function is None:
            self._function = resolve_dotted_path(str(self.stage.function), "function")

    def begin(self, request: StageRequest, parameters: Any) -> StageRequest:
        return request

    def window(self, state: StageRequest, sources: Sources) -> Any:
        assert self._function is not None
        return self._function(state, sources)


class BatchFunction(PlainFunction):
    """A `StageBatchFunction` as a stage."""

    streams = False

    def __init__(self, stage: OmniStageConfig, model: str, function: Callable[..., Any] | None = None) -> None:
        super().__init__(stage, model, function)
        self.batch_size = stage.runtime.max_batch_size or 8
        self.wrong_type = f"{stage.batch_function} must return dicts"

    def start(self) -> None:
        if self._function is None:
            self._function = resolve_dotted_path(str(self.stage.batch_function), "batch_function")

    def window(self, state: StageRequest, sources: Sources) -> Any:
        return _value_of(self.windows([state], [sources])[0])

    def windows(self, states: Sequence[StageRequest], sources: Sequence[Sources]) -> Sequence[Any]:
        """A result for each request, or an exception."""
        assert self._function is not None
        results = self._function(states, sources)
        if not isinstance(results, Sequence) or len(results) != len(states):
            path = self.stage.batch_function
            raise TypeError(f"{path} must return a list with one result for each of {len(states)}")
        return results


@dataclass(eq=False)
class _Run:
    """One request in the engine.

    Attributes:
        windows: Those that wait.
        is_busy: A call for it runs.
        has_begun: It has a `state`, which has not been released.
        aborted: Read between two pieces.
        streams: Its output is read while it is made.
        playback: Of its client, if it has one.
        new_s: Seconds that the output of its last call plays.
    """

    request: StageRequest
    windows: deque[WorkItem]
    playback: Playback
    streams: bool = False
    is_busy: bool = False
    has_begun: bool = False
    aborted: threading.Event = field(default_factory=threading.Event)
    state: Any = None
    new_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def rank(self, playing_time: PlayingTime) -> tuple[bool, Urgency]:
        """The least is next: a release, then the most urgent window."""
        if self.aborted.is_set():
            return False, Urgency(0, False, 0.0)
        first, due = self.windows[0], self.playback.until
        if not self.streams:  # Nobody plays it: it is due when it could have been played.
            due += playing_time.estimate(_size_of(first))
        is_first = isinstance(first, NewRequest) and (self.streams or not first.is_last)
        return True, Urgency(self.request.priority, not is_first, due)

    def next_call(self) -> "_Call":
        self.is_busy, self.new_s = True, 0.0
        return _Call(self, None if self.aborted.is_set() else self.windows.popleft())


@dataclass(slots=True)
class _Call:
    """A request's next window; None: its state is released."""

    run: _Run
    window: WorkItem | None

    @property
    def has_input(self) -> bool:
        """The input may also end without a further window."""
        return isinstance(self.window, NewRequest) or (self.window is not None and bool(self.window.sources))


class FunctionStageEngine(StageEngine):
    """Calls a function, or the methods of a `FunctionStage`, for each request or each window of its input."""

    def __init__(self, outbox: Outbox, function: FunctionStage, num_threads: int = 0) -> None:
        """
        Args:
            num_threads: Calls at the same time, each in a thread. 0, of a plain function: one at a time, in the
                engine's own thread.
        """
        super().__init__(outbox)
        self._function = function
        self._plain = function if isinstance(function, PlainFunction) else None
        self._batch_size = 1 if self._plain is None else self._plain.batch_size
        # Of a plain function: those to compute, and the next ones.
        self.capacity = 2 * self._batch_size if self._plain is not None else _REQUESTS_PER_THREAD * num_threads
        self._stage_id = function.stage.stage_id
        self._playing_time = PlayingTime()
        self._timers = [StepTimer() for _ in range(num_threads)]
        self._num_idle = max(1, num_threads)
        self._runs: dict[str, _Run] = {}
        self._ready: list[_Run] = []  # in the order in which they became ready
        self._calls: queue.SimpleQueue[list[_Call] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def set_timers(self, make_timer: Callable[[], StepTimer]) -> None:
        super().set_timers(make_timer)
        self._timers = [make_timer() for _ in self._timers]

    def start(self) -> None:
        self._function.start()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(timer,), daemon=True) for timer in self._timers]
        for thread in threads:
            thread.start()
        super().run()
        for run in self._runs.values():
            run.aborted.set()
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join()
        for run in self._runs.values():
            self._release(run)
        if self._error is not None:
            raise self._error

    # The engine's thread.

    def has_work(self) -> bool:
        return bool(self._ready) and self._num_idle > 0

    def is_computing(self) -> bool:
        return self._num_idle < len(self._timers)

    def step(self) -> None:
        """Makes the next call, or passes it to an idle thread."""
        self._ready.sort(key=lambda run: run.rank(self._playing_time))
        calls = [run.next_call() for run in self._ready[: self._batch_size]]
        del self._ready[: self._batch_size]
        self._num_idle -= 1
        if self._timers:
            self._calls.put(calls)
        else:
            self._take_back(calls, *self._compute(calls, self.step_timer))

    def _take_in(self, item: RequestItem) -> None:
        if isinstance(item, NewRequest):
            playback = Playback(time.monotonic(), item.request.sent_s)
            self._runs[item.request_id] = _Run(item.request, deque(), playback, item.streams_output)
        run = self._runs.get(item.request_id)
        if run is None:
            return
        if isinstance(item, AbortRequest):
            run.aborted.set()
        else:
            run.windows.append(item)
        if not run.is_busy and run not in self._ready:
            self._ready.append(run)

    def _take_back(self, calls: Sequence[_Call], ended: Sequence[_Run], seconds: float) -> None:
        """Calls have returned, and requests are complete, or have failed."""
        self._num_idle += 1
        self._count_step(seconds, len(calls))
        for call in calls:
            run = call.run
            if call.window is not None:
                self._playing_time.add(_size_of(call.window), run.new_s)
            run.is_busy = False
            if run in ended:
                del self._runs[run.request_id]
            elif run.windows or run.aborted.is_set():
                self._ready.append(run)

    # The other threads; without any, the engine's.

    def _work(self, timer: StepTimer) -> None:
        try:
            while (calls := self._calls.get()) is not None:
                with timer:
                    done = self._compute(calls, timer)
                self.inbox.put(partial(self._take_back, calls, *done))
        except BaseException as error:
            self._error = error
            self.stop()

    def _compute(self, calls: list[_Call], timer: StepTimer) -> tuple[list[_Run], float]:
        """The requests that have ended, and the seconds that it took."""
        started = time.monotonic()
        if len(calls) == 1:
            ended = [call.run for call in calls if self._call(call, self._window, timer)]
        else:
            ended = self._call_batch(calls, timer)
        return ended, time.monotonic() - started

    def _call_batch(self, calls: list[_Call], timer: StepTimer) -> list[_Run]:
        """Windows of several requests, and releases."""
        assert isinstance(self._function, BatchFunction)
        inputs = {call.run: call.window.sources for call in calls if call.window is not None and call.has_input}
        try:
            results = self._function.windows([run.request for run in inputs], list(inputs.values())) if inputs else ()
        except Exception:
            results = ()  # The error does not name a request: each request gets a call of its own.
        computed = dict(zip(inputs, results, strict=False))

        def window(run: _Run, sources: Sources) -> Any:
            return _value_of(computed[run]) if run in computed else self._window(run, sources)

        with self.outbox.batch():
            return [call.run for call in calls if self._call(call, window, timer)]

    def _window(self, run: _Run, sources: Sources) -> Any:
        return self._function.window(run.state, sources)

    def _call(self, call: _Call, window: Callable[[_Run, Sources], Any], timer: StepTimer) -> bool:
        """
        Args:
            window: What the function returns for a window.

        Returns:
            Whether the request has ended.
        """
        run = call.run
        try:
            has_ended = self._advance(call, window, timer)
        except Exception as error:
            self._release(run)
            self.outbox.put(Error.from_exception(run.request_id, error, isinstance(error, InvalidRequestError)))
            return True
        if not has_ended and run.aborted.is_set():
            self._release(run)
            return True
        return has_ended

    def _advance(self, call: _Call, window: Callable[[_Run, Sources], Any], timer: StepTimer) -> bool:
        """Sends the output for a window, and the end of the request if it is the last. Whether it is complete."""
        run, item, last = call.run, call.window, None
        if item is None:
            return False
        if isinstance(item, NewRequest):
            parameters = convert(run.request.parameters, self._function.parameters)
            run.state = self._function.begin(run.request, parameters)
            run.has_begun = True
        if call.has_input:
            values = window(run, item.sources)
            if self._plain is not None and not (self._plain.streams and isinstance(values, Iterator)):
                values = self._as_output(run, values)
                if item.is_last:  # One message has this output and the end.
                    last, values = values, None
            self._send(run, values, timer)
        if not item.is_last or run.aborted.is_set():
            return False
        self._send(run, self._function.end(run.state), timer)
        if run.aborted.is_set():
            return False
        run.has_begun = False
        last = last or StageOutput(request_id=run.request_id, stage_id=self._stage_id)
        self.outbox.put(Result(run.request_id, last))
        return True

    def _send(self, run: _Run, values: Any, timer: StepTimer) -> None:
        """Sends pieces of output as they are made, until an abort."""
        pieces = values if isinstance(values, Iterator) else iter(() if values is None else (values,))
        try:
            for piece in pieces:
                timer.restart()
                if not self._is_live(run):
                    return
                output = self._as_output(run, piece)
                seconds = playing_s(output, self._function.stage.sample_rate)
                run.new_s += seconds
                run.playback.add(time.monotonic(), seconds)
                self.outbox.put(Stream(run.request_id, output))
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _is_live(self, run: _Run) -> bool:
        """Whether a request has not been aborted. Without threads, the inbox is read first."""
        while not self._timers and not self.inbox.empty():
            self._read(self.inbox.get())
        if self._is_stopping:
            run.aborted.set()
        return not run.aborted.is_set()

    def _as_output(self, run: _Run, piece: Any) -> StageOutput:
        if isinstance(piece, StageOutput):
            return piece
        if isinstance(piece, dict):
            return make_stage_output(run.request, self._stage_id, piece)
        name = type(self._function).__name__
        expected = f"{name} must return or yield dicts" if self._plain is None else self._plain.wrong_type
        raise TypeError(f"{expected}, not {type(piece).__name__}")

    def _release(self, run: _Run) -> None:
        """Releases the state of a request that is not complete."""
        if not run.has_begun:
            return
        run.has_begun = False
        try:
            self._function.abort(run.state)
        except Exception:
            log = about(logger, request_id=run.request_id, stage=self._function.stage.label)
            log.exception("the state of a request could not be released")


def _size_of(window: WorkItem) -> int:
    """The characters of a window's text, by which its playing time is estimated; at least 1."""
    texts = (source.completions[0].text for source in window.sources.values() if source.completions)
    return max(1, sum(map(len, texts)))


def _value_of(result: Any) -> Any:
    """A function's result. Raises it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result


def make_stage_output(request: StageRequest, stage_id: int, values: dict[str, Any]) -> StageOutput:
    """Sorts a function's values into the fields of a stage output; arrays are tensors there."""
    values = {name: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in values.items()}
    text = values.get("text")
    return StageOutput(
        request_id=request.request_id,
        stage_id=stage_id,
        prompt_token_ids=request.prompt_token_ids,
        completions=[] if text is None else [Completion(text=text, finish_reason="stop")],
        tensors={name: value for name, value in values.items() if isinstance(value, torch.Tensor)},
        data={name: value for name, value in values.items() if name != "text" and not isinstance(value, torch.Tensor)},
    )
