# SPDX-License-Identifier: Apache-2.0
"""The one surface that every kind of stage shows to the shell around it.

The shell puts requests into the `inbox` and takes results from the `outbox`; it never asks which kind of engine it
holds. The engine runs on the stage's main thread and sleeps while there is nothing to do.
"""

import contextlib
import os
import queue
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.metrics.recorder import NullRecorder, StageRecorder
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.watchdog import StepTimer


@dataclass(slots=True)
class NewRequest:
    """Work for the engine.

    Attributes:
        request: The request as this stage sees it.
        stage_input: What the stage input processor made of it; None at the first stage and at stages without one.
        sources: The outputs that it was made of, by stage id: whole results, or the first window of each.
        is_last: All of the input is here; else `StreamChunk`s follow, up to one that is the last.
        streams_output: Somebody reads the output while it is made: put `Stream` items.
        emits_rows: Somebody reads what the model makes besides tokens; else it need not leave the model runner.
    """

    request: StageRequest
    stage_input: StageInput | None = None
    sources: Mapping[int, StageOutput] = field(default_factory=dict)
    is_last: bool = True
    streams_output: bool = False
    emits_rows: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class StreamChunk:
    """More input for a request, in order.

    Attributes:
        stage_input, sources: As in `NewRequest`, for the next window; both empty where the input merely ended.
        is_last: Nothing follows.
    """

    request_id: str
    stage_input: StageInput | None = None
    sources: Mapping[int, StageOutput] = field(default_factory=dict)
    is_last: bool = False


@dataclass(slots=True)
class AbortRequest:
    request_id: str


@dataclass(slots=True)
class Stop:
    pass


@dataclass(slots=True)
class Stream:
    """A piece of a request's output: what is new since the last one. Only for requests that stream their output."""

    request_id: str
    output: StageOutput


@dataclass(slots=True)
class Result:
    """A request is complete. `output` is what is new since its last `Stream` item: all of it, if there was none."""

    request_id: str
    output: StageOutput
    num_input_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class Error:
    """A request failed. `invalid` says that the request itself was wrong."""

    request_id: str
    error: str
    traceback: str
    invalid: bool = False

    @classmethod
    def from_exception(cls, request_id: str, exception: BaseException, invalid: bool = False) -> "Error":
        return cls(
            request_id=request_id,
            error=f"{type(exception).__name__}: {exception}",
            traceback="".join(traceback.format_exception(exception)),
            invalid=invalid,
        )


@dataclass(slots=True)
class Started:
    """The engine takes requests."""


OutboxItem = Stream | Result | Error | Started
InboxItem = NewRequest | StreamChunk | AbortRequest | Stop


class Outbox:
    """A queue whose reader sleeps in a poll: `fileno` is readable while something waits.

    The reader is woken once for all items that it has not taken yet.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[OutboxItem] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._is_woken = False  # The reader has yet to look, or will be woken: `put` need not wake it.

    def fileno(self) -> int:
        return self._reader

    def put(self, item: OutboxItem) -> None:
        self._items.put(item)
        if not self._is_woken:
            self._wake()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """The reader is woken at the end, for all that is put meanwhile."""
        self._is_woken = True
        try:
            yield
        finally:
            self._is_woken = False  # First: what another thread puts from now on wakes the reader itself.
            if not self._items.empty():
                self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        with contextlib.suppress(BlockingIOError):  # The pipe is full of wake-ups already.
            os.write(self._writer, b"\0")

    def take_all(self) -> list[OutboxItem]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 65536)
        self._is_woken = False  # Before the items are taken: what is put from now on wakes the reader again.
        items: list[OutboxItem] = []
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items


class StageEngine(ABC):
    """Runs the requests of one stage.

    Attributes:
        capacity: Requests that it should hold at once: the shell hands over no more. Known after `start`.
        recorder: Is told of every step.
        step_timer: Around every step.
        always_compiles: Any step may compile something, not the first one alone.
    """

    capacity: int
    always_compiles = False

    def __init__(self, outbox: Outbox) -> None:
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.outbox = outbox
        self.recorder: StageRecorder = NullRecorder(0, "")
        self.step_timer = StepTimer()

    def abort(self, request_id: str) -> None:
        """Forgets a request. Harmless for one that is complete or unknown. Called from any thread."""
        self.inbox.put(AbortRequest(request_id))

    def stop(self) -> None:
        """Makes `run` return. Called from any thread."""
        self.inbox.put(Stop())

    def must_start_first(self) -> bool:
        """Whether it has to start before those that need not, where engines share a process. Called before `start`."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Loads what the stage needs; slow."""

    @abstractmethod
    def run(self) -> None:
        """Works until `stop`.

        Raises:
            Exception: The engine is broken; the process is of no more use.
        """

    def kv_blocks(self) -> tuple[int, int]:
        """KV cache blocks that are held, and that there are. Called from any thread."""
        return 0, 0

    def close(self) -> None:  # noqa: B027 (not every engine holds something)
        """Releases what `start` took."""


WorkItem = NewRequest | StreamChunk
Pieces = StageOutput | Iterator[StageOutput]


class SerialEngine(StageEngine):
    """An engine that computes in calls of Python, in order of arrival: one call for each request, or each window."""

    capacity = 2  # one to compute, and one to go on with

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(outbox)
        self._requests: dict[str, StageRequest] = {}
        self._work: deque[WorkItem] = deque()
        self._is_stopping = False

    @abstractmethod
    def compute(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> Pieces:
        """The output for these sources: at once, or piece by piece.

        Raises:
            Exception: Fails this request alone.
        """

    def run(self) -> None:
        while self.wait_for_work():
            with self.step_timer:
                self.step()

    def wait_for_work(self) -> bool:
        """Sleeps until there is work; false once the engine is to stop."""
        while not self._is_stopping and (not self._work or not self.inbox.empty()):
            self._take_in(self.inbox.get())
        return not self._is_stopping

    def step(self) -> None:
        """Does one item of work."""
        item = self._work.popleft()
        started = time.monotonic()
        try:
            pieces = self.compute(self._requests[item.request_id], item.sources)
            self._emit(item, pieces)
        except Exception as error:
            self._fail(item.request_id, error)
        self.recorder.step(time.monotonic() - started, 1)

    def is_live(self, request_id: str) -> bool:
        """Takes note of what has arrived meanwhile; whether the request is still wanted."""
        while not self.inbox.empty():
            self._take_in(self.inbox.get())
        return request_id in self._requests and not self._is_stopping

    def _take_in(self, item: InboxItem) -> None:
        match item:
            case Stop():
                self._is_stopping = True
            case AbortRequest():
                self._forget(item.request_id)
            case NewRequest():
                self._requests[item.request_id] = item.request
                self._work.append(item)
            case StreamChunk():
                if item.request_id in self._requests:
                    self._work.append(item)

    def _emit(self, item: WorkItem, pieces: Pieces) -> None:
        request_id = item.request_id
        if isinstance(pieces, StageOutput):
            last = pieces
        else:
            for piece in pieces:
                if not self.is_live(request_id):
                    return
                self.outbox.put(Stream(request_id, piece))
                self.step_timer.restart()
            last = StageOutput(request_id=request_id, stage_id=-1)
        if item.is_last:
            self._requests.pop(request_id, None)
            self.outbox.put(Result(request_id, last))
        elif isinstance(pieces, StageOutput):
            self.outbox.put(Stream(request_id, last))

    def _fail(self, request_id: str, error: Exception) -> None:
        self._forget(request_id)
        self.outbox.put(Error.from_exception(request_id, error))

    def _forget(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._work = deque(item for item in self._work if item.request_id != request_id)
