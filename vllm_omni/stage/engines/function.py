# SPDX-License-Identifier: Apache-2.0
"""A stage that is a plain Python function."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import Outbox, Pieces, SerialEngine, WorkItem

Sources = Mapping[int, StageOutput]

StageFunction = Callable[[StageRequest, Sources], "dict[str, Any] | Iterator[dict[str, Any]]"]
"""`function(request, sources) -> {name: value}`: tensors, plain values, and `text` for a text output.

Where an edge has a window size it is called for each window (`sources[i].start`, `.context`, `.is_last`). A generator
streams: each dict that it yields is a piece of the output."""

StageBatchFunction = Callable[[Sequence[StageRequest], Sequence[Sources]], "Sequence[dict[str, Any] | Exception]"]
"""`function(requests, sources) -> [{name: value}, ...]`: the same for several requests at once; an exception in the
place of a result fails that request alone."""


class FunctionStageEngine(SerialEngine):
    """Calls the function for each request."""

    def __init__(self, outbox: Outbox, stage_id: int, function_path: str) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
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
    """Calls the function for all requests that wait, up to a number."""

    def __init__(self, outbox: Outbox, stage_id: int, function_path: str, max_batch_size: int) -> None:
        super().__init__(outbox)
        self.capacity = 2 * max_batch_size
        self._stage_id = stage_id
        self._function_path = function_path
        self._max_batch_size = max_batch_size
        self._function: StageBatchFunction

    def start(self) -> None:
        self._function = resolve_dotted_path(self._function_path, "batch_function")

    def step(self) -> None:
        batch = [self._work.popleft() for _ in range(min(len(self._work), self._max_batch_size))]
        started = time.monotonic()
        results = self._compute_batch(batch)
        with self.outbox.batch():
            for item, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    self._fail(item.request_id, result)
                elif item.request_id in self._requests:
                    self._emit(item, result)
        self.recorder.step(time.monotonic() - started, len(batch))

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
            # Which of them is to blame cannot be seen: each has a call of its own.
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
    """Sorts a function's values into what a stage output carries."""
    text = values.get("text")
    return StageOutput(
        request_id=request.request_id,
        stage_id=stage_id,
        prompt_token_ids=request.prompt_token_ids,
        completions=[] if text is None else [Completion(text=text, finish_reason="stop")],
        tensors={name: value for name, value in values.items() if isinstance(value, torch.Tensor)},
        data={name: value for name, value in values.items() if name != "text" and not isinstance(value, torch.Tensor)},
    )
