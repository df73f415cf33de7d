# SPDX-License-Identifier: Apache-2.0
"""`StageEngine`: the interface of all engines to the stage's shell.

The shell puts requests into the `inbox` and takes results from the `outbox`; it does not know the kind of the engine.
The engine runs on the main thread of its process, and sleeps while it has no work.
"""

import contextlib
import queue
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.control import (
    DEFAULT_WEIGHT_VERSION,
    CheckWeights,
    CommitWeights,
    DropWeights,
    Freeze,
    LoadWeights,
    StartProfile,
    StopProfile,
    Thaw,
    UpdateWeightVersion,
    Verb,
)
from vllm_omni.distributed.wake_up import WakeUp
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.stats import CacheCounts, MetricFamily
from vllm_omni.outputs import StageOutput
from vllm_omni.placement.budgets import available_memory
from vllm_omni.placement.shared_cores import SharedCores
from vllm_omni.stage.watchdog import INTAKE, StepTimer
from vllm_omni.stage.weights import Parts, WeightFolder

if TYPE_CHECKING:
    from vllm_omni.stage.profiler import ProcessProfiler


@dataclass(slots=True)
class NewRequest:
    """Work for the engine.

    Attributes:
        request: The stage's request.
        stage_input: The result of the stage input processor; None at the first stage and at stages without one.
        sources: The outputs that it was made of, by stage id: whole results, or the first window of each.
        is_last: The input is complete; otherwise `StreamChunk`s follow, up to one with `is_last`.
        streams_output: The output is read while it is made: put `Stream` items.
        emits_rows: The model's tensors are read; otherwise they need not leave the model runner.
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
        stage_input, sources: As in `NewRequest`, for the next window; both empty if the input only ended.
        is_last: The input is complete.
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
    """A piece of a request's output, without the pieces before. Only for requests with `streams_output`."""

    request_id: str
    output: StageOutput


@dataclass(slots=True)
class Result:
    """A request is complete. `output` is what follows its last `Stream` item: all of it, if there was none."""

    request_id: str
    output: StageOutput
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Error:
    """A request failed.

    Attributes:
        error: Of an invalid request the reason, for its client; otherwise with the name of the exception's class.
        kind: The name of the exception's class.
        invalid: The request itself is wrong.
    """

    request_id: str
    error: str
    traceback: str
    kind: str
    invalid: bool = False

    @classmethod
    def from_exception(cls, request_id: str, exception: BaseException, invalid: bool = False) -> "Error":
        kind, reason = type(exception).__name__, str(exception)
        return cls(
            request_id=request_id,
            error=reason if invalid and reason else f"{kind}: {reason}",
            kind=kind,
            traceback="".join(traceback.format_exception(exception)),
            invalid=invalid,
        )


@dataclass(slots=True)
class Started:
    """The engine accepts requests."""


OutboxItem = Stream | Result | Error | Started
ForShell = OutboxItem | Callable[[], None]
"""A function is called on the IO thread: threads of its own report to it."""
RequestItem = NewRequest | StreamChunk | AbortRequest
InboxItem = RequestItem | Stop | Callable[[], None]
"""A function is called on the engine's thread: threads of its own report to it."""


class Outbox:
    """A queue whose reader sleeps in a poll: `fileno` is readable while items wait.

    The reader is woken once for all items that it has not taken yet.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[ForShell] = queue.SimpleQueue()
        self._wake_up = WakeUp()
        self._is_woken = False  # The reader will read the queue anyway: `put` need not wake it.

    def fileno(self) -> int:
        return self._wake_up.fileno()

    def put(self, item: ForShell) -> None:
        self._items.put(item)
        if not self._is_woken:
            self._wake()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Wakes the reader once, at the end, for all items that are put meanwhile."""
        self._is_woken = True
        try:
            yield
        finally:
            self._is_woken = False  # First: items that other threads put from now on wake the reader.
            if not self._items.empty():
                self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        self._wake_up.set()

    def take_all(self) -> list[ForShell]:
        self._wake_up.clear()
        self._is_woken = False  # Before the items are taken: later items wake the reader again.
        items: list[ForShell] = []
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items


class StageEngine(ABC):
    """Runs the requests of one stage.

    Attributes:
        capacity: Requests that it should hold at once: the shell passes no more. Set by `start`.
        recorder: Counts the steps.
        step_timer: Entered around every step, and around everything that reads an item of the inbox.
        always_compiles: Any step may compile something, not only the first one.
        weight_version: Of the weights that it computes with; empty: not known.
        cores: Those of a CPU that it shares with other stages; None: it has its own.
        has_own_profiler: The engine's workers have vLLM's.
        profiler: Of this process; None: it has none.
        on_failure: Called from any thread when the engine is broken outside of a step.
        processes: Ids of other processes of the engine on this machine; set by `start`.
    """

    capacity: int
    processes: Sequence[int] = ()
    always_compiles = False
    has_own_profiler = False

    def __init__(self, outbox: Outbox) -> None:
        # Not a `SimpleQueue`: its `get` with a timeout waits for ever if its thread is interrupted for longer than the
        # timeout just before it sleeps.
        self.inbox: queue.Queue[InboxItem] = queue.Queue()
        self.outbox = outbox
        self.recorder = StageRecorder(-1, "")  # replaced by the stage's
        self.step_timer = StepTimer()
        self.on_failure: Callable[[], None] = lambda: None
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self.cores: SharedCores | None = None
        self.profiler: ProcessProfiler | None = None
        self._is_stopping = False
        self._is_frozen = False
        self._commit_weights: Callable[[], None] | None = None  # of those that were loaded
        self._loaded_parts: Parts = set()
        self._weights_path: str | None = None  # of the last ones that were committed

    def abort(self, request_id: str) -> None:
        """Drops a request. Does nothing if it is complete or unknown. Called from any thread."""
        self.inbox.put(AbortRequest(request_id))

    def stop(self) -> None:
        """Makes `run` return. Called from any thread."""
        self.inbox.put(Stop())

    def set_timers(self, make_timer: Callable[[], StepTimer]) -> None:
        """Sets the time limits of its threads. Called before `start`.

        Args:
            make_timer: Makes the timer of one thread.
        """
        self.step_timer = make_timer()

    def compiles_at_start(self) -> bool:
        """Whether `start` compiles its model, which may take minutes. Called before it."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Loads what the stage needs; slow."""

    def run(self) -> None:
        """Works until `stop`.

        Raises:
            Exception: The engine is broken; the process must end.
        """
        self._is_stopping = False
        while self.wait_for_work():
            if self.cores is not None:
                self.cores.take()
            with self.step_timer:
                self.step()

    def wait_for_work(self) -> bool:
        """Reads the inbox; sleeps while there is no work, or the stage is frozen. False when the engine must stop."""
        while not self._is_stopping and (self._is_frozen or not (self.inbox.empty() and self.has_work())):
            self._read(self._next_item())
        return not self._is_stopping

    def _next_item(self, timeout: float | None = None) -> InboxItem:
        """Waits for an item of the inbox. Raises `queue.Empty` after `timeout` seconds."""
        if self.cores is not None and not self.is_computing():
            self.cores.release()
        return self.inbox.get(timeout=timeout)

    def _read(self, item: InboxItem) -> None:
        if isinstance(item, Stop):
            self._is_stopping = True
            return
        with self.step_timer.of(INTAKE):
            if isinstance(item, RequestItem):
                self._take_in(item)
            else:
                item()

    def control(self, verb: Verb) -> Any:
        """Does what an operator asks for, between two steps; on the engine's thread.

        Returns:
            What the verb returns: plain data, but what is not is made text.

        Raises:
            ValueError: The stage does not know the verb, or an argument is wrong.
            Exception: It could not be done.
        """
        match verb:
            case Freeze():
                self._is_frozen = True
            case Thaw():
                self._is_frozen = False
            case StartProfile() | StopProfile():
                if self.profiler is None:
                    raise ValueError("it has no profiler; set profiler_config (--profiler-config)")
                self.profiler.control(verb)
            case CheckWeights():
                self._weight_folder.check(verb.weights_path)
                _check_memory(self._weight_bytes())
            case LoadWeights():
                self._commit_weights = None
                self._loaded_parts = self._weight_folder.check(verb.weights_path)
                with self._weight_folder.overlay(verb.weights_path) as folder:
                    self._commit_weights = self._load_weights(folder)
            case CommitWeights():
                self._commit(verb)
            case DropWeights():
                self._commit_weights = None
            case UpdateWeightVersion():
                self.weight_version = verb.new_version
            case _:
                raise ValueError(f"this kind of stage does not know {type(verb).__name__}")

    def _commit(self, verb: CommitWeights) -> None:
        commit, self._commit_weights = self._commit_weights, None
        if commit is None:
            raise RuntimeError("no weights were loaded")
        if self.has_requests():
            raise RuntimeError("it has requests, which are computed with other weights")
        self.weight_version = ""
        commit()
        self._weight_folder.changed |= self._loaded_parts
        self.weight_version, self._weights_path = verb.weight_version, verb.weights_path

    @property
    def _weight_folder(self) -> WeightFolder:
        """What new weights have to be like."""
        raise ValueError("the weights of this kind of stage cannot change while it runs")

    def _weight_bytes(self) -> int:
        """Host memory of the weights that it computes with, at least: others beside them take as much."""
        return 0

    def _load_weights(self, folder: Path) -> Callable[[], None]:
        """Loads a checkpoint beside the one that it computes with.

        Returns:
            Makes it compute with that, and forget what was computed with the other.

        Raises:
            Exception: It cannot be loaded; nothing has changed.
        """
        raise NotImplementedError

    def has_requests(self) -> bool:
        """Whether it holds requests that have begun."""
        return self.has_work()

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def is_computing(self) -> bool:
        """Whether threads of its own compute, while the engine's waits."""
        return False

    @abstractmethod
    def step(self) -> None:
        """Computes something for the requests that it holds. Raises as `run`."""

    def _count_step(self, seconds: float, batch_size: int) -> None:
        """A step has computed something of so many requests."""
        self.recorder.step(seconds, batch_size)
        if self.profiler is not None:
            self.profiler.step()

    @abstractmethod
    def _take_in(self, item: RequestItem) -> None:
        """Starts, continues or drops a request."""

    def kv_blocks(self) -> tuple[int, int]:
        """KV cache blocks in use, and in total. Called from any thread."""
        return 0, 0

    def cache_counts(self) -> dict[str, CacheCounts]:
        """The counts of `StageStats.caches`. Called from any thread."""
        return {}

    def unbatched(self) -> list[str]:
        """`StageStats.unbatched`. Called from any thread."""
        return []

    def metrics(self) -> list[MetricFamily]:
        """The engine's own metrics, if it has any. Called from any thread."""
        return []

    def close(self) -> None:  # noqa: B027 (optional)
        """Releases what `start` took."""


def _check_memory(num_bytes: int) -> None:
    """Refuses weights that do not fit beside others: the kernel would end a process, perhaps another one.

    Raises:
        ValueError: Names the sizes.
    """
    available = available_memory()
    if num_bytes > available:
        raise ValueError(
            f"the new weights take {num_bytes / 2**30:.2f} GiB beside its own, and {available / 2**30:.2f} GiB are free"
        )
