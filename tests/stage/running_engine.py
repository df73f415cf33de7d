# SPDX-License-Identifier: Apache-2.0
"""Runs a stage engine in a thread of the test, which has the shell's part."""

import queue
import select
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.outputs import StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.base import Error, InboxItem, NewRequest, Outbox, Result, StageEngine, Stream, StreamChunk

PATIENCE = 240
"""Seconds. Only reports a failure before pytest's own limit: other work on the machine may take most of it."""


class WatchedInbox:
    """An inbox that records whether its reader sleeps, and accepts several items at once."""

    def __init__(self) -> None:
        self._items: deque[InboxItem] = deque()
        self._changed = threading.Condition()
        self._is_asleep = False

    def put(self, *items: InboxItem) -> None:
        with self._changed:
            self._items += items
            self._is_asleep = False
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> InboxItem:
        with self._changed:
            while not self._items:
                self._is_asleep = True
                self._changed.notify_all()
                if not self._changed.wait(timeout):
                    raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def wait_asleep(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_asleep, PATIENCE)


class StepCounter(StageRecorder):
    """Records the batch size of each step."""

    def __init__(self) -> None:
        super().__init__(0, "")
        self.batch_sizes: list[int] = []
        self.after: dict[int, Callable[[], None]] = {}  # called once, on the engine's thread, after so many steps

    def step(self, seconds: float, batch_size: int) -> None:
        self.batch_sizes.append(batch_size)
        if call := self.after.pop(len(self.batch_sizes), None):
            call()


class RunningEngine:
    """Sends items to the engine, and collects its outputs by request."""

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.inbox = WatchedInbox()
        engine.inbox = self.inbox  # type: ignore[assignment]
        engine.recorder = self.counter = StepCounter()
        self.items: dict[str, list[Stream | Result | Error]] = defaultdict(list)
        self._thread = threading.Thread(target=engine.run, daemon=True)
        self._thread.start()

    def put(self, *items: InboxItem) -> None:
        """All at once, without a step in between."""
        self.inbox.put(*items)

    def put_after(self, num_steps: int, *items: InboxItem) -> None:
        """All at once, when the engine has made so many steps."""
        self.counter.after[num_steps] = partial(self.put, *items)

    def wait_asleep(self) -> None:
        """Until the engine has read its inbox and has no work."""
        assert self.inbox.wait_asleep(), "the engine does not become idle"
        self.take_items()

    def wait_for(self, request_id: str, num_items: int = 1) -> list[Stream | Result | Error]:
        """Until a request has this many items."""
        for _ in range(PATIENCE * 100):
            self.take_items()
            if len(self.items[request_id]) >= num_items:
                return self.items[request_id]
            self._thread.join(0.01)
        raise AssertionError(f"{request_id}: {self.items[request_id]}")

    def finish(self, *request_ids: str) -> list[StageOutput]:
        """Waits until the engine is idle; returns the complete outputs of these requests."""
        self.wait_asleep()
        return [self.output(request_id) for request_id in request_ids]

    def output(self, request_id: str) -> StageOutput:
        """The merged output of a request."""
        *pieces, last = self.items[request_id]
        assert isinstance(last, Result), last
        assert all(isinstance(piece, Stream) for piece in pieces)
        return merge_stage_outputs([item.output for item in (*pieces, last)])

    def error(self, request_id: str) -> Error:
        """The error that a request ended with, its last item."""
        *pieces, last = self.items[request_id]
        assert isinstance(last, Error) and all(isinstance(piece, Stream) for piece in pieces)
        return last

    def stop(self) -> None:
        self.engine.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def take_items(self) -> None:
        """Collects new outputs."""
        for item in self.engine.outbox.take_all():
            self.items[item.request_id].append(item)


def is_readable(outbox: Outbox) -> bool:
    """Whether its reader is woken."""
    return bool(select.select([outbox], [], [], 0)[0])


def new_request(request_id: str, stage_input: StageInput, params: Any, **attributes: Any) -> NewRequest:
    return NewRequest(StageRequest(request_id=request_id, sampling_params=params), stage_input, **attributes)


def chunk(request_id: str, stage_input: StageInput | None = None, is_last: bool = False) -> StreamChunk:
    return StreamChunk(request_id, stage_input, is_last=is_last)
