# SPDX-License-Identifier: Apache-2.0
"""Several calls of one module computed as one: their arguments joined along the batch dimension, the output split.

A call is that of a single picture, so its batch holds one row, or two where a pipeline computes the guided and the
unguided picture in one go. What has that many entries is taken for a batch; all else has to be the same in every call.
Only a sequence that comes with a mask (`encoder_hidden_states`, `encoder_hidden_states_mask`) may have another length
in each: it is padded. Knows no module and no pipeline.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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
class Rows:
    """How a call holds its batch.

    Attributes:
        count: Rows of it.
        in_lists: Pictures come in a list, and so does everything of any length that belongs to one.
    """

    count: int
    in_lists: bool

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self.count

    def are_items_of(self, value: list) -> bool:
        """Whether a list has one entry for each row; a list of batches has not."""
        if len(value) != self.count:
            return False
        return self.in_lists or not any(isinstance(item, torch.Tensor) and self.has(item) for item in value)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call that waits to be computed.

    Attributes:
        function: What is called; calls of different functions are never joined.
        rows: Its batch.
        layout: Calls with the same can be computed as one.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    rows: Rows
    layout: Hashable

    @classmethod
    def describe(
        cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], shared: SharedTensors
    ) -> "ModuleCall":
        leading = next((value for value in (*args, *kwargs.values()) if _leads(value)), None)
        rows = Rows(1 if leading is None else len(leading), in_lists=isinstance(leading, list))
        # Pictures of one batch have one size: padding a small one to a large one would waste more than is won.
        sizes = tuple(tuple(picture.shape) for picture in leading) if isinstance(leading, list) else ()
        masked = _masked_sequences(kwargs, rows)
        others = {key: value for key, value in kwargs.items() if key not in (*masked, *masked.values())}
        layout = (
            *(id(function), rows, sizes),
            *(_layout(args, rows, shared), _layout(others, rows, shared)),
            *((name, kwargs[name].shape[2], kwargs[name].dtype) for name in masked),
        )
        return cls(function, args, kwargs, rows, layout)


def compute(calls: Sequence[ModuleCall]) -> list[Any]:
    """The output of each of these calls, which have the same layout.

    Raises:
        CannotSplitError: They can only be computed one by one.
        Exception: What the function raises.
    """
    first = calls[0]
    if len(calls) == 1:
        return [first.function(*first.args, **first.kwargs)]
    rows, num_calls = first.rows, len(calls)
    args = _join([call.args for call in calls], rows)
    kwargs: dict[str, Any] = {}
    masked = _masked_sequences(first.kwargs, rows)
    for name, mask_name in masked.items():
        sequences, masks = ([call.kwargs[key] for call in calls] for key in (name, mask_name))
        kwargs[name], kwargs[mask_name] = _pad(sequences, masks)
    for name in first.kwargs.keys() - kwargs.keys():
        kwargs[name] = _join([call.kwargs[name] for call in calls], rows)
    return _split(first.function(*args, **kwargs), rows.count, num_calls)


def _leads(value: Any) -> bool:
    """Whether it tells how many rows a call has, if it is the first that does."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def _masked_sequences(kwargs: dict[str, Any], rows: Rows) -> dict[str, str]:
    """Arguments `[rows, length, features]` that come with a mask `[rows, length]`, and the name of that."""
    found = {}
    for name, value in kwargs.items():
        mask_name = f"{name}_mask"
        if mask_name in kwargs and isinstance(value, torch.Tensor) and value.ndim == 3 and rows.has(value):
            mask = kwargs[mask_name]
            if mask is None or (mask.shape == value.shape[:2] and not mask.is_floating_point()):
                found[name] = mask_name
    return found


def _pad(sequences: list[torch.Tensor], masks: list[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences `[rows, length, features]` as one, as long as the longest, and its mask, if it needs one."""
    length = max(sequence.shape[1] for sequence in sequences)
    padded = [F.pad(sequence, (0, 0, 0, length - sequence.shape[1])) for sequence in sequences]
    if all(mask is None for mask in masks) and all(sequence.shape[1] == length for sequence in sequences):
        return torch.cat(padded), None
    full = [
        torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device) if mask is None else mask.bool()
        for sequence, mask in zip(sequences, masks, strict=True)
    ]
    return torch.cat(padded), torch.cat([F.pad(mask, (0, length - mask.shape[1])) for mask in full])


def _layout(value: Any, rows: Rows, shared: SharedTensors) -> Hashable:
    match value:
        case torch.Tensor() if value.ndim == 0:
            return ("scalar", value.dtype)
        case torch.Tensor() if rows.has(value):
            return ("rows", tuple(value.shape[1:]), value.dtype)
        case torch.Tensor():
            return ("shared", tuple(value.shape), value.dtype, shared.digest(value))
        case list() if rows.are_items_of(value):
            return ("list", *(_item_layout(item, rows, shared) for item in value))
        case list() | tuple():
            return (type(value), *(_layout(item, rows, shared) for item in value))
        case dict():
            return ("dict", *((key, _layout(item, rows, shared)) for key, item in value.items()))
        case _ if isinstance(value, _PLAIN):
            return ("plain", type(value), value)
        case _:
            return ("object", id(value))


def _item_layout(item: Any, rows: Rows, shared: SharedTensors) -> Hashable:
    """Of what belongs to one row. Plain values have to be equal: a network may look at those of the first row only."""
    if not isinstance(item, torch.Tensor):
        return _layout(item, rows, shared)
    return ("item", item.dtype, None if rows.in_lists else tuple(item.shape))


def _join(values: list[Any], rows: Rows) -> Any:
    first = values[0]
    match first:
        case torch.Tensor() if first.ndim == 0:
            return torch.cat([value.expand(rows.count) for value in values])
        case torch.Tensor() if rows.has(first):
            return torch.cat(values)
        case list() if rows.are_items_of(first):
            return [item for value in values for item in value]
        case list() | tuple():
            return type(first)(_join([value[i] for value in values], rows) for i in range(len(first)))
        case dict():
            return {key: _join([value[key] for value in values], rows) for key in first}
        case _:
            return first


def _split(output: Any, count: int, num_calls: int) -> list[Any]:
    """The parts of an output, `count` rows for each call."""
    match output:
        case torch.Tensor() if output.ndim > 0 and output.shape[0] == count * num_calls:
            return list(output.split(count))
        case list() if len(output) == count * num_calls:
            return [output[i * count : (i + 1) * count] for i in range(num_calls)]
        case tuple():
            columns = [_split(item, count, num_calls) for item in output]
            return [tuple(column[i] for column in columns) for i in range(num_calls)]
        case dict():  # the output classes of transformers and diffusers are dicts, too
            # Pipelines read an encoder's states; its cache, which cannot be split, is for generating text.
            fields = {key: _split(item, count, num_calls) for key, item in output.items() if key != "past_key_values"}
            return [type(output)(**{key: field[i] for key, field in fields.items()}) for i in range(num_calls)]
        case None:
            return [None] * num_calls
        case _:
            raise CannotSplitError(f"a {type(output).__name__} in the output of a batch")
