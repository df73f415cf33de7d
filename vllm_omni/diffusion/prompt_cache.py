# SPDX-License-Identifier: Apache-2.0
"""Encoded prompts of requests that repeat, as the same prompt with another seed: the results of `encode_prompt`.

A result is found by all that its computation reads: the pipeline's class, the adapter, every argument of the method,
and the settings that the pipeline's call has noted on itself. Knows no pipeline by name.
"""

import contextlib
import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.utils.cache import LRUCache

from vllm_omni.diffusion.job import Adapter
from vllm_omni.metrics.stats import CacheCounts

_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


class _UnknownValueError(Exception):
    """A value that cannot be compared."""


class PromptCache:
    """The least recently used results are removed first. They are on the CPU: an accelerator's memory is scarcer."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all results; 0: keeps none."""
        self._results: LRUCache[Hashable, Any] = LRUCache(max_bytes, getsizeof=_num_bytes)

    @property
    def counts(self) -> CacheCounts:
        """Hits and queries, counted in calls of `encode_prompt`."""
        stats = self._results.stat()
        return CacheCounts(queries=stats.total, hits=stats.hits)

    def clear(self) -> None:
        """Forgets all results."""
        self._results.clear()

    def encode(self, pipe: Any, adapter: Adapter, method: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """The result of `encode_prompt`.

        Args:
            pipe: The pipeline whose method it is.
            method: Calls it.
            arguments: Its arguments by name, those with default values and `self` included.
        """
        try:
            key = _key(pipe, adapter, arguments)
        except _UnknownValueError:
            return method()
        found = self._results.get(key)
        if found is not None:
            return _copy(found, arguments.get("device") or pipe._execution_device)
        result = method()
        with contextlib.suppress(_UnknownValueError):
            self._results.put_if_fits(key, _copy(result, torch.device("cpu")))
        return result


def _key(pipe: Any, adapter: Adapter, arguments: dict[str, Any]) -> Hashable:
    given = {name: value for name, value in arguments.items() if value is not pipe}
    return (type(pipe).__qualname__, adapter, _identify(given), _noted_settings(pipe))


def _noted_settings(pipe: Any) -> Hashable:
    """Attributes that a pipeline's call sets, such as `_guidance_scale`: a method may read them. Modules are the same
    for all calls."""
    noted = []
    for name, value in vars(pipe).items():
        if name.startswith("_") and not name.startswith("__"):
            try:
                noted.append((name, _identify(value)))
            except _UnknownValueError:
                continue
    return tuple(sorted(noted, key=lambda item: item[0]))


def _identify(value: Any) -> Hashable:
    """Equal for equal values only.

    Raises:
        _UnknownValueError: It has parts of other types than plain values, tensors, arrays and images.
    """
    match value:
        case _ if isinstance(value, _PLAIN):
            return (type(value), value)
        case dict():
            return ("dict", *((key, _identify(item)) for key, item in value.items()))
        case list() | tuple():
            return (type(value), *map(_identify, value))
        case torch.Tensor():
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return ("tensor", value.dtype, value.shape, hashlib.sha256(data.numpy().tobytes()).digest())
        case np.ndarray() if value.dtype != object:
            return ("array", value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest())
        case Image.Image():
            return ("image", value.mode, value.size, hashlib.sha256(value.tobytes()).digest())
        case _:
            raise _UnknownValueError


def _copy(value: Any, device: torch.device) -> Any:
    """A result in memory of its own: a pipeline may change what it got.

    Raises:
        _UnknownValueError: It has parts that are no tensors.
    """
    match value:
        case None:
            return None
        case torch.Tensor():
            return value.detach().to(device, copy=True)
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_copy(item, device) for item in value)
        case _:
            raise _UnknownValueError


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return 0 if value is None else sum(map(_num_bytes, value))
