# SPDX-License-Identifier: Apache-2.0
"""The one surface that every kind of stage shows to the shell around it.

The shell puts requests into the `inbox` and takes results from the `outbox`; it never asks which kind of engine it
holds. The engine runs on the stage's main thread and sleeps while there is nothing to do.
"""

import contextlib
import os
import queue
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.outputs import StageOutput


@dataclass(slots=True)
class NewRequest:
    """Work for the engine.

    Attributes:
        request: The request as this stage sees it.
        stage_input: What the stage input processor made of it; None at the first stage and at stages without one.
        sources: The outputs that it was made of, by stage id: whole results, or the first window of each.
        is_last: All of the input is here; else `StreamChunk`s follow, up to one that is the last.
        streams_output: Somebody reads the output while it is made: put `Stream` items.
    """

    request: StageRequest
    stage_input: StageInput | None = None
    sources: Mapping[int, StageOutput] = field(default_factory=dict)
    is_last: bool = True
    streams_output: bool = False


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
    """A queue whose reader sleeps in a poll: `fileno` is readable while something waits."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[OutboxItem] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        return self._reader

    def put(self, item: OutboxItem) -> None:
        self._items.put(item)
        with contextlib.suppress(BlockingIOError):  # The pipe is full of wake-ups already.
            os.write(self._writer, b"\0")

    def take_all(self) -> list[OutboxItem]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 65536)
        items: list[OutboxItem] = []
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items


class StageEngine(ABC):
    """Runs the requests of one stage.

    Attributes:
        capacity: Requests that it should hold at once: the shell hands over no more. Known after `start`.
    """

    capacity: int

    def __init__(self, outbox: Outbox) -> None:
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.outbox = outbox

    def abort(self, request_id: str) -> None:
        """Forgets a request. Harmless for one that is complete or unknown. Called from any thread."""
        self.inbox.put(AbortRequest(request_id))

    def stop(self) -> None:
        """Makes `run` return. Called from any thread."""
        self.inbox.put(Stop())

    @abstractmethod
    def start(self) -> None:
        """Loads what the stage needs; slow."""

    @abstractmethod
    def run(self) -> None:
        """Works until `stop`."""

    def close(self) -> None:  # noqa: B027 (not every engine holds something)
        """Releases what `start` took."""


class OneAtATimeEngine(StageEngine):
    """An engine that computes each request in one call, in order of arrival."""

    @abstractmethod
    def compute(self, new_request: NewRequest) -> StageOutput:
        """The request's output.

        Raises:
            Exception: Fails this request alone.
        """

    def run(self) -> None:
        waiting: dict[str, NewRequest] = {}
        while self._take_inbox(waiting):
            self._compute(waiting.pop(next(iter(waiting))))

    def _take_inbox(self, waiting: dict[str, NewRequest]) -> bool:
        """Sleeps until there is work; false once the engine is to stop."""
        while not waiting or not self.inbox.empty():
            item = self.inbox.get()
            if isinstance(item, Stop):
                return False
            if isinstance(item, AbortRequest):
                waiting.pop(item.request_id, None)
            else:
                waiting[item.request.request_id] = item
        return True

    def _compute(self, item: NewRequest) -> None:
        request_id = item.request.request_id
        try:
            output = self.compute(item)
        except Exception as error:
            self.outbox.put(Error.from_exception(request_id, error))
        else:
            self.outbox.put(Result(request_id, output))
