# SPDX-License-Identifier: Apache-2.0
"""Stages that compute in calls of Python: a plain function, or a function for a batch."""

import contextlib
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.inputs import StageRequest
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

WorkItem = NewRequest | StreamChunk
Pieces = StageOutput | Iterator[StageOutput]
Sources = Mapping[int, StageOutput]

StageFunction = Callable[[StageRequest, Sources], "dict[str, Any] | Iterator[dict[str, Any]]"]
"""`function(request, sources) -> {name: value}`: tensors, plain values, and `text` for a text output.

Where an edge has a window size the function is called for each window (`sources[i].start`, `.context`, `.is_last`). A
generator streams: each dict that it yields is a piece of the output."""

StageBatchFunction = Callable[[Sequence[StageRequest], Sequence[Sources]], "Sequence[dict[str, Any] | Exception]"]
"""`function(requests, sources) -> [{name: value}, ...]`: the same for several requests at once; an exception in place
of a result fails only that request."""


class SerialEngine(StageEngine):
    """Makes one call for each request, or for each window of its input."""

    capacity = 2  # one to compute, and the next one
    lock = contextlib.nullcontext()  # It uses nothing of vLLM's.

    def __init__(self, outbox: Outbox, stage_id: int) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
        self._requests: dict[str, StageRequest] = {}
        self._first_windows: deque[WorkItem] = deque()
        self._work: deque[WorkItem] = deque()

    @abstractmethod
    def compute(self, request: StageRequest, sources: Sources) -> Pieces:
        """The output for these sources: at once, or piece by piece.

        Raises:
            Exception: Fails only this request.
        """

    def has_work(self) -> bool:
        return bool(self._first_windows or self._work)

    def step(self) -> None:
        """Computes one work item."""
        item = self._next_item()
        started = time.monotonic()
        try:
            last = self._stream(item.request_id, self.compute(self._requests[item.request_id], item.sources))
        except Exception as error:
            self._fail(item.request_id, error)
            last = None
        self.recorder.step(time.monotonic() - started, 1)
        if last is not None:
            self._emit(item, last)

    def is_live(self, request_id: str) -> bool:
        """Reads the inbox; whether the request has not been aborted."""
        while not self.inbox.empty():
            self._read(self.inbox.get())
        return request_id in self._requests and not self._is_stopping

    def _take_in(self, item: RequestItem) -> None:
        match item:
            case AbortRequest():
                self._forget(item.request_id)
            case NewRequest():
                self._requests[item.request_id] = item.request
                (self._work if item.is_last else self._first_windows).append(item)
            case StreamChunk():
                if item.request_id in self._requests:
                    self._work.append(item)

    def _next_item(self) -> WorkItem:
        """The first window of a stream passes everything else: a client waits for it."""
        return (self._first_windows or self._work).popleft()

    def _stream(self, request_id: str, pieces: Pieces) -> StageOutput | None:
        """Emits the pieces as they are made. Returns what follows them; None if the request was aborted."""
        if isinstance(pieces, StageOutput):
            return pieces
        for piece in pieces:
            if not self.is_live(request_id):
                return None
            self.outbox.put(Stream(request_id, piece))
            self.step_timer.restart()
        return StageOutput(request_id=request_id, stage_id=self._stage_id)

    def _emit(self, item: WorkItem, output: StageOutput) -> None:
        """Emits the output of an item, the last act of a step: the IO thread wakes up, and both need the same lock."""
        if item.is_last:
            self._requests.pop(item.request_id, None)
            self.outbox.put(Result(item.request_id, output))
        else:
            self.outbox.put(Stream(item.request_id, output))

    def _fail(self, request_id: str, error: Exception) -> None:
        self._forget(request_id)
        self.outbox.put(Error.from_exception(request_id, error))

    def _forget(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            for items in (self._first_windows, self._work):
                for item in [item for item in items if item.request_id == request_id]:
                    items.remove(item)


class FunctionStageEngine(SerialEngine):
    """Calls the function for each request."""

    def __init__(self, outbox: Outbox, stage_id: int, function_path: str) -> None:
        super().__init__(outbox, stage_id)
        self._function_path = function_path
        self._function: StageFunction

    def start(self) -> None:
        self._function = resolve_dotted_path(self._function_path, "function")

    def compute(self, request: StageRequest, sources: Sources) -> Pieces:
        values = self._function(request, sources)
        if isinstance(values, Iterator):
            return (self._as_output(request, piece) for piece in values)
        return self._as_output(request, values)

    def _as_output(self, request: StageRequest, values: Any) -> StageOutput:
        if not isinstance(values, dict):
            raise TypeError(f"{self._function_path} must return a dict, not {type(values).__name__}")
        return make_stage_output(request, self._stage_id, values)


class BatchFunctionStageEngine(SerialEngine):
    """Calls the function for all waiting requests, up to `max_batch_size`."""

    def __init__(self, outbox: Outbox, stage_id: int, function_path: str, max_batch_size: int) -> None:
        super().__init__(outbox, stage_id)
        self.capacity = 2 * max_batch_size
        self._function_path = function_path
        self._max_batch_size = max_batch_size
        self._function: StageBatchFunction

    def start(self) -> None:
        self._function = resolve_dotted_path(self._function_path, "batch_function")

    def step(self) -> None:
        num_waiting = len(self._first_windows) + len(self._work)
        batch = [self._next_item() for _ in range(min(num_waiting, self._max_batch_size))]
        started = time.monotonic()
        results = self._compute_batch(batch)
        self.recorder.step(time.monotonic() - started, len(batch))
        with self.outbox.batch():
            for item, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    self._fail(item.request_id, result)
                elif item.request_id in self._requests:
                    self._emit(item, result)

    def compute(self, request: StageRequest, sources: Sources) -> StageOutput:
        (result,) = self._call([request], [sources])
        if isinstance(result, Exception):
            raise result
        return result

    def _compute_batch(self, batch: list[WorkItem]) -> list[StageOutput | Exception]:
        requests = [self._requests[item.request_id] for item in batch]
        sources = [item.sources for item in batch]
        try:
            return self._call(requests, sources)
        except Exception:
            # The error does not name a request: each request gets a call of its own.
            return [self._compute_alone(request, source) for request, source in zip(requests, sources, strict=True)]

    def _compute_alone(self, request: StageRequest, sources: Sources) -> StageOutput | Exception:
        try:
            return self.compute(request, sources)
        except Exception as error:
            return error

    def _call(self, requests: list[StageRequest], sources: list[Sources]) -> list[StageOutput | Exception]:
        results = self._function(requests, sources)
        if not isinstance(results, Sequence) or len(results) != len(requests):
            raise TypeError(f"{self._function_path} must return a list with one result for each of {len(requests)}")
        return [self._as_output(request, result) for request, result in zip(requests, results, strict=True)]

    def _as_output(self, request: StageRequest, result: Any) -> StageOutput | Exception:
        if isinstance(result, Exception):
            return result
        if not isinstance(result, dict):
            return TypeError(f"{self._function_path} must return dicts, not {type(result).__name__}")
        return make_stage_output(request, self._stage_id, result)


def make_stage_output(request: StageRequest, stage_id: int, values: dict[str, Any]) -> StageOutput:
    """Sorts a function's values into the fields of a stage output."""
    text = values.get("text")
    return StageOutput(
        request_id=request.request_id,
        stage_id=stage_id,
        prompt_token_ids=request.prompt_token_ids,
        completions=[] if text is None else [Completion(text=text, finish_reason="stop")],
        tensors={name: value for name, value in values.items() if isinstance(value, torch.Tensor)},
        data={name: value for name, value in values.items() if name != "text" and not isinstance(value, torch.Tensor)},
    )
