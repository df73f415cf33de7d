# SPDX-License-Identifier: Apache-2.0
"""Several calls of one module computed as one: their arguments joined along the batch dimension, the output split.

A call is that of a single picture, so its batch holds one row, or two where a pipeline computes the guided and the
unguided picture in one go. What has that many entries is taken for a batch; all else has to be the same in every call.
Knows no module and no pipeline.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class CannotSplitError(Exception):
    """An output holds something that is not known to have rows."""


class SharedTensors:
    """Digests of tensors without rows, so that two calls can be compared without comparing tensors at every step."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[torch.Tensor, int, bytes]] = {}

    def digest(self, tensor: torch.Tensor) -> bytes:
        known = self._digests.get(id(tensor))
        if known is None or known[1] != tensor._version:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            known = (tensor, tensor._version, hashlib.blake2b(data, digest_size=16).digest())
            self._digests[id(tensor)] = known  # With the tensor: else another one could get its id.
        return known[2]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call that waits to be computed.

    Attributes:
        function: What is called; calls of different functions are never joined.
        num_rows: Rows of its batch.
        layout: Calls with the same can be computed as one.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    num_rows: int
    layout: Hashable

    @classmethod
    def describe(
        cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], shared: SharedTensors
    ) -> "ModuleCall":
        leading = next((value for value in (*args, *kwargs.values()) if _has_rows(value)), None)
        num_rows = 1 if leading is None else len(leading)
        # Pictures of one batch have one size: padding a small one to a large one would waste more than is won.
        size = [tuple(item.shape) for item in leading] if isinstance(leading, list) else None
        layout = (id(function), num_rows, str(size), _layout(args, num_rows, shared), _layout(kwargs, num_rows, shared))
        return cls(function, args, kwargs, num_rows, layout)


def compute(calls: Sequence[ModuleCall]) -> list[Any]:
    """The output of each of these calls, which have the same layout.

    Raises:
        CannotSplitError: They can only be computed one by one.
        Exception: What the function raises.
    """
    first = calls[0]
    if len(calls) == 1:
        return [first.function(*first.args, **first.kwargs)]
    rows = [call.num_rows for call in calls]
    args = _join([call.args for call in calls], rows)
    kwargs = _join([call.kwargs for call in calls], rows)
    return _split(first.function(*args, **kwargs), rows)


def _has_rows(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def _is_batch_list(value: list, num_rows: int) -> bool:
    """Whether a list has one entry for each row; a list of batches has not."""
    return len(value) == num_rows and not any(
        isinstance(item, torch.Tensor) and item.ndim > 0 and item.shape[0] == num_rows for item in value
    )


def _layout(value: Any, num_rows: int, shared: SharedTensors) -> Hashable:
    match value:
        case torch.Tensor() if value.ndim == 0:
            return ("scalar", value.dtype)
        case torch.Tensor() if value.shape[0] == num_rows:
            return ("rows", tuple(value.shape[1:]), value.dtype)
        case torch.Tensor():
            return ("shared", tuple(value.shape), value.dtype, shared.digest(value))
        case list() if _is_batch_list(value, num_rows):
            return ("list",)
        case list() | tuple():
            return (type(value), *(_layout(item, num_rows, shared) for item in value))
        case dict():
            return ("dict", *((key, _layout(item, num_rows, shared)) for key, item in value.items()))
        case _ if isinstance(value, _PLAIN):
            return ("plain", type(value), value)
        case _:
            return ("object", id(value))


def _join(values: list[Any], rows: list[int]) -> Any:
    first, num_rows = values[0], rows[0]
    match first:
        case torch.Tensor() if first.ndim == 0:
            return torch.cat([value.expand(count) for value, count in zip(values, rows, strict=True)])
        case torch.Tensor() if first.shape[0] == num_rows:
            return torch.cat(values)
        case list() if _is_batch_list(first, num_rows):
            return [item for value in values for item in value]
        case list() | tuple():
            return type(first)(_join([value[i] for value in values], rows) for i in range(len(first)))
        case dict():
            return {key: _join([value[key] for value in values], rows) for key in first}
        case _:
            return first


def _split(output: Any, rows: list[int]) -> list[Any]:
    total = sum(rows)
    match output:
        case torch.Tensor() if output.ndim > 0 and output.shape[0] == total:
            return list(output.split(rows))
        case list() if len(output) == total:
            ends = [sum(rows[: i + 1]) for i in range(len(rows))]
            return [output[end - count : end] for end, count in zip(ends, rows, strict=True)]
        case tuple():
            columns = [_split(item, rows) for item in output]
            return [tuple(column[i] for column in columns) for i in range(len(rows))]
        case dict():  # the output classes of transformers and diffusers are dicts, too
            fields = {key: _split(item, rows) for key, item in output.items() if key != "past_key_values"}
            # Pipelines read an encoder's states; its cache, which cannot be split, is for generating text.
            return [type(output)(**{key: field[i] for key, field in fields.items()}) for i in range(len(rows))]
        case None:
            return [None] * len(rows)
        case _:
            raise CannotSplitError(f"a {type(output).__name__} in the output of a batch")
