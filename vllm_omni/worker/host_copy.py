# SPDX-License-Identifier: Apache-2.0
"""Bringing a step's outputs to the CPU: asynchronous copies into pinned memory, and one wait for all of them."""

from collections.abc import Sequence

import torch


class HostCopy:
    """Copies that have been started. Other work may be queued on the device before `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [_start_copy(tensor) for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the CPU. One that was there already is itself, so it may still be the model's."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
