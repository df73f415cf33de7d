# SPDX-License-Identifier: Apache-2.0
"""Several calls of one module computed as one: their arguments joined along the batch dimension, the output split.

A call is that of a single picture, so its batch holds one row, or two where a pipeline computes the guided and the
unguided picture in one go. What has that many entries is taken for a batch; all else has to be the same in every call.
Only a sequence that comes with a mask (`encoder_hidden_states`, `encoder_hidden_states_mask`) may have another length
in each: it is padded. Knows no module and no pipeline.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F

_KEPT_TENSORS = 64
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class CannotSplitError(Exception):
    """An output holds something that is not known to have rows."""


class _Value:
    """What a tensor holds, bit by bit: one object for all tensors that were found to be equal.

    Attributes:
        different: Values of which it is known that they are not this one.
    """

    def __init__(self) -> None:
        self.different: WeakSet[_Value] = WeakSet()


@dataclass(slots=True, eq=False)
class SharedTensor:
    """A tensor without rows, as it was when a network was called with it.

    Attributes:
        memory: Where it lies, and how often that was written to: of two tensors that both live, equal in this, each
            holds what the other does.
        value: Changes when it turns out to be that of another tensor.
    """

    tensor: torch.Tensor
    memory: Hashable
    value: _Value = field(default_factory=_Value)


class SharedTensors:
    """The tensors without rows that one call of a pipeline gives to its networks: most of them again at every step.

    They are known again by their memory, so that nobody waits for a device to look at what they hold. As long as one is
    kept, no other can get its memory.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, SharedTensor] = {}

    def find(self, tensor: torch.Tensor) -> SharedTensor:
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), tensor._version, form)
        known = self._known.pop(memory, None) or SharedTensor(tensor, memory)
        self._known[memory] = known  # as the newest
        if len(self._known) > _KEPT_TENSORS:
            del self._known[next(iter(self._known))]
        return known


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
        layout: Calls with the same can be computed as one if their shared tensors are equal.
        shared: What has to be equal and is a tensor, in the order of the arguments.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    rows: Rows
    layout: Hashable
    shared: tuple[SharedTensor, ...] = ()

    @classmethod
    def describe(
        cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], tensors: SharedTensors
    ) -> "ModuleCall":
        """
        Args:
            tensors: Of the pipeline's call that makes this one.
        """
        leading = next((value for value in (*args, *kwargs.values()) if _leads(value)), None)
        rows = Rows(1 if leading is None else len(leading), in_lists=isinstance(leading, list))
        # Pictures of one batch have one size: padding a small one to a large one would waste more than is won.
        sizes = tuple(tuple(picture.shape) for picture in leading) if isinstance(leading, list) else ()
        masked = _masked_sequences(kwargs, rows)
        others = {key: value for key, value in kwargs.items() if key not in (*masked, *masked.values())}
        shared: list[SharedTensor] = []

        def share(tensor: torch.Tensor) -> None:
            shared.append(tensors.find(tensor))

        layout = (
            *(id(function), rows, sizes),
            *(_layout(args, rows, share), _layout(others, rows, share)),
            *((name, kwargs[name].shape[2], kwargs[name].dtype) for name in masked),
        )
        return cls(function, args, kwargs, rows, layout, tuple(shared))


def find_joinable(call: ModuleCall, others: Sequence[ModuleCall]) -> list[bool]:
    """Which of these calls can be computed as one with `call`.

    Shared tensors are compared bit by bit, on their device and only where it is not known already whether they are
    equal: then the CPU waits once, for all of them.
    """
    alike = [other.layout == call.layout for other in others]
    pairs = [
        pair
        for other, is_alike in zip(others, alike, strict=True)
        if is_alike
        for pair in zip(call.shared, other.shared, strict=True)
    ]
    _compare([pair for pair in pairs if not _is_decided(*pair)])
    return [
        is_alike and all(a.value is b.value for a, b in zip(call.shared, other.shared, strict=True))
        for other, is_alike in zip(others, alike, strict=True)
    ]


def _is_decided(a: SharedTensor, b: SharedTensor) -> bool:
    if a.memory == b.memory:
        b.value = a.value
    return a.value is b.value or b.value in a.value.different


def _compare(pairs: list[tuple[SharedTensor, SharedTensor]]) -> None:
    """Finds out whether the two of each pair, of one shape, dtype and device, hold the same."""
    by_device: dict[torch.device, list[tuple[SharedTensor, SharedTensor]]] = defaultdict(list)
    for pair in pairs:
        by_device[pair[0].tensor.device].append(pair)
    for group in by_device.values():
        equal = torch.stack([(_as_bits(a.tensor) == _as_bits(b.tensor)).all() for a, b in group])
        for (a, b), is_equal in zip(group, equal.tolist(), strict=True):
            if is_equal:
                b.value = a.value
            else:
                a.value.different.add(b.value)
                b.value.different.add(a.value)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that -0.0 is not 0.0, and a NaN is itself."""
    tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_AS_BITS[plain.element_size()])


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


def _layout(value: Any, rows: Rows, share: Callable[[torch.Tensor], None]) -> Hashable:
    match value:
        case torch.Tensor() if value.ndim == 0:
            return ("scalar", value.dtype)
        case torch.Tensor() if rows.has(value):
            return ("rows", tuple(value.shape[1:]), value.dtype)
        case torch.Tensor():
            share(value)
            return ("shared", tuple(value.shape), value.dtype, value.device)
        case list() if rows.are_items_of(value):
            return ("list", *(_item_layout(item, rows, share) for item in value))
        case list() | tuple():
            return (type(value), *(_layout(item, rows, share) for item in value))
        case dict():
            return ("dict", *((key, _layout(item, rows, share)) for key, item in value.items()))
        case _ if isinstance(value, _PLAIN):
            return ("plain", type(value), value)
        case _:
            return ("object", id(value))


def _item_layout(item: Any, rows: Rows, share: Callable[[torch.Tensor], None]) -> Hashable:
    """Of what belongs to one row. Plain values have to be equal: a network may look at those of the first row only."""
    if not isinstance(item, torch.Tensor):
        return _layout(item, rows, share)
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
