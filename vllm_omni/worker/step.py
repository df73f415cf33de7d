# SPDX-License-Identifier: Apache-2.0
"""One step of a model runner, and its outputs while they are copied to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_omni.model_executor.feedback import FedBack
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.outputs import stream_dim
from vllm_omni.worker.guided_pairs import NO_PAIRS, StepPairs

Outputs = dict[str, torch.Tensor]
"""Outputs of a model by name."""


class HostCopy:
    """Asynchronous copies to pinned memory of the CPU. Other work may be queued on the device before `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [_start_copy(tensor) for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the CPU. One that was on the CPU is returned itself, so it may still be the model's."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class EmittedRows:
    """The outputs of rows, while they are copied to the CPU."""

    @classmethod
    def join(cls, parts: list[tuple[np.ndarray, FedBack]], first: dict[int, Outputs]) -> "EmittedRows":
        """Joins several parts, of different requests and with outputs of the same names."""
        if not parts:
            return cls(np.zeros(0, dtype=np.int64), {}, None, first)
        requests = np.concatenate([requests for requests, _ in parts])
        fed_back = [part for _, part in parts]
        outputs = {name: torch.cat([part.outputs[name] for part in fed_back]) for name in fed_back[0].outputs}
        is_last = [part.is_last for part in fed_back if part.is_last is not None]
        return cls(requests, outputs, torch.cat(is_last) if is_last else None, first)

    def __init__(
        self, requests: np.ndarray, outputs: Outputs, is_last: torch.Tensor | None, first: dict[int, Outputs]
    ) -> None:
        """
        Args:
            requests: `[N]`, the rows' requests, by their index in the batch; at most one row each.
            outputs: By name, `[N, ...]`; `audio` is `[N, samples]`, and a row of it leaves as `[samples]`.
            is_last: `[N]` bool, the rows that end their request; None for no row.
            first: The first outputs of other requests, by index in the batch.
        """
        self._requests = requests
        self._names = list(outputs)
        self._copy = HostCopy([*outputs.values(), *(() if is_last is None else (is_last,))])
        self._has_last = is_last is not None
        self._first = [(index, list(tensors), HostCopy(list(tensors.values()))) for index, tensors in first.items()]

    def wait(self, num_reqs: int) -> tuple[list[dict[str, torch.Tensor] | None], list[int]]:
        """The rows `[n, ...]` of each output for each request of the batch, or None; and the requests that end."""
        emitted: list[dict[str, torch.Tensor] | None] = [None] * num_reqs
        copies = self._copy.wait()
        ended = self._requests[copies.pop().numpy()].tolist() if self._has_last else []
        rows = [_as_rows(name, tensor.clone()) for name, tensor in zip(self._names, copies, strict=True)]
        for request, *parts in zip(self._requests.tolist(), *rows, strict=True):
            emitted[request] = dict(zip(self._names, parts, strict=True))
        for index, names, copy in self._first:
            emitted[index] = dict(zip(names, (tensor.clone() for tensor in copy.wait()), strict=True))
        return emitted, ended


def _as_rows(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.unbind() if stream_dim(name) else tensor.split(1)


@dataclass(slots=True)
class RunnerStep:
    """What a model runner keeps of a step between vLLM's calls, from its scheduler output to its own output.

    Attributes:
        num_scheduled_tokens: Of its requests, by vLLM's id.
        pairs: The pairs of its requests with guidance.
        spans: Its requests, in batch order; None until they are used.
        preprocessed: What the model's `preprocess` has returned besides embeddings.
        emitted: The rows of a model with feedback that leave with this step.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    pairs: StepPairs = NO_PAIRS
    spans: list[RequestSpan] | None = None
    preprocessed: Outputs = field(default_factory=dict)
    emitted: EmittedRows | None = None
