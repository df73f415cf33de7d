# SPDX-License-Identifier: Apache-2.0
"""The KV cache on a CPU takes memory when it is written to.

vLLM's is filled with zeros at the start, so that a stage takes all of its `kv_cache_memory_bytes` before its first
request. The memory of a new mapping is zero already, and the system supplies each page at the first write.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CPUKVCache(CPUModelRunner):
    """A base of our runners."""

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with UnwrittenZeros():
            return super().initialize_kv_cache_tensors(*args, **kwargs)


class UnwrittenZeros(TorchFunctionMode):
    """Inside, int8 zeros `[n]` on a CPU are a mapping of their own; all else is as without it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_flat = func is torch.zeros and [type(arg) for arg in args] == [int] and args[0] > 0
        if is_flat and kwargs == {"dtype": torch.int8, "device": torch.device("cpu")}:
            mapping = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(mapping, dtype=torch.int8)  # It keeps the mapping.
        return func(*args, **kwargs or {})
