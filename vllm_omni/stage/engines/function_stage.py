# SPDX-License-Identifier: Apache-2.0
"""Runs a `FunctionStage` in one or more threads.

The engine's thread owns all state: it passes one call at a time of each request to a thread of its own, which reports
its end in the inbox.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_omni.config.utils import convert
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import FunctionStage, Values
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import (
    AbortRequest,
    Error,
    NewRequest,
    Outbox,
    RequestItem,
    Result,
    StageEngine,
    Stream,
)
from vllm_omni.stage.engines.function import WorkItem, make_stage_output
from vllm_omni.stage.watchdog import StepTimer

logger = get_logger(__name__)

_REQUESTS_PER_THREAD = 32
"""Requests that the engine holds: most of them wait for their next window."""


@dataclass(eq=False)
class _Run:
    """One request in the engine.

    Attributes:
        windows: Those that wait.
        is_busy: A thread works on it.
        has_begun: It has a `state`, which has not been released.
        aborted: Its thread reads it between two pieces.
    """

    request: StageRequest
    windows: deque[WorkItem]
    is_busy: bool = False
    has_begun: bool = False
    aborted: threading.Event = field(default_factory=threading.Event)
    state: Any = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest is next: a release; then the first window of a stream, since a client waits for it."""
        if self.aborted.is_set():
            return 0, 0
        first = self.windows[0]
        is_urgent = isinstance(first, NewRequest) and (first.streams_output or not first.is_last)
        return 1 if is_urgent else 2, self.request.priority


@dataclass(slots=True)
class _Call:
    """A call for a thread: a request's next window; None: its state is released."""

    run: _Run
    window: WorkItem | None


class FunctionStageThreads(StageEngine):
    """Calls the methods of a `FunctionStage`, for up to `num_threads` requests at once."""

    lock = contextlib.nullcontext()  # It uses nothing of vLLM's.

    def __init__(self, outbox: Outbox, function: FunctionStage, num_threads: int) -> None:
        super().__init__(outbox)
        self.capacity = _REQUESTS_PER_THREAD * num_threads
        self._function = function
        self._stage_id = function.stage.stage_id
        self._timers = [StepTimer() for _ in range(num_threads)]
        self._num_idle = num_threads
        self._runs: dict[str, _Run] = {}
        self._ready: list[_Run] = []  # in the order in which they became ready
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
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

    def step(self) -> None:
        """Passes a call to an idle thread."""
        run = min(self._ready, key=lambda run: run.rank)
        self._ready.remove(run)
        run.is_busy = True
        self._num_idle -= 1
        self._calls.put(_Call(run, None if run.aborted.is_set() else run.windows.popleft()))

    def _take_in(self, item: RequestItem) -> None:
        if isinstance(item, NewRequest):
            self._runs[item.request_id] = _Run(item.request, deque())
        run = self._runs.get(item.request_id)
        if run is None:
            return
        if isinstance(item, AbortRequest):
            run.aborted.set()
        else:
            run.windows.append(item)
        if not run.is_busy and run not in self._ready:
            self._ready.append(run)

    def _take_back(self, run: _Run, seconds: float, has_ended: bool) -> None:
        """A thread has finished a call; the request is complete, or has failed, if it `has_ended`."""
        run.is_busy = False
        self._num_idle += 1
        self.recorder.step(seconds, 1)
        if has_ended:
            del self._runs[run.request_id]
        elif run.windows or run.aborted.is_set():
            self._ready.append(run)

    # The other threads.

    def _work(self, timer: StepTimer) -> None:
        try:
            while (call := self._calls.get()) is not None:
                started = time.monotonic()
                with timer:
                    has_ended = self._call(call, timer)
                self.inbox.put(partial(self._take_back, call.run, time.monotonic() - started, has_ended))
        except BaseException as error:
            self._error = error
            self.stop()

    def _call(self, call: _Call, timer: StepTimer) -> bool:
        """Whether the request has ended."""
        run = call.run
        try:
            has_ended = call.window is not None and self._compute(run, call.window, timer)
        except Exception as error:
            self._release(run)
            self.outbox.put(Error.from_exception(run.request_id, error, isinstance(error, InvalidRequestError)))
            return True
        if not has_ended and run.aborted.is_set():
            self._release(run)
            return True
        return has_ended

    def _compute(self, run: _Run, item: WorkItem, timer: StepTimer) -> bool:
        """Computes a window, and the end of the request if it is the last. Whether the request is complete."""
        is_first = isinstance(item, NewRequest)
        if is_first:
            parameters = convert(run.request.parameters, self._function.parameters)
            run.state = self._function.begin(run.request, parameters)
            run.has_begun = True
        if is_first or item.sources:  # The input may also end without a further window.
            self._send(run, self._function.window(run.state, item.sources), timer)
        if not item.is_last or run.aborted.is_set():
            return False
        self._send(run, self._function.end(run.state), timer)
        if run.aborted.is_set():
            return False
        run.has_begun = False
        self.outbox.put(Result(run.request_id, StageOutput(request_id=run.request_id, stage_id=self._stage_id)))
        return True

    def _send(self, run: _Run, values: Values | None, timer: StepTimer) -> None:
        """Sends pieces of output as they are made, until an abort."""
        pieces = values if isinstance(values, Iterator) else iter(() if values is None else (values,))
        try:
            for piece in pieces:
                timer.restart()
                if run.aborted.is_set():
                    return
                self.outbox.put(Stream(run.request_id, self._as_output(run, piece)))
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _as_output(self, run: _Run, piece: Any) -> StageOutput:
        if not isinstance(piece, dict):
            name = type(self._function).__name__
            raise TypeError(f"{name} must return or yield dicts, not {type(piece).__name__}")
        return make_stage_output(run.request, self._stage_id, piece)

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
