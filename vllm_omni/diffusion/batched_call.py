# SPDX-License-Identifier: Apache-2.0
"""Several calls of one module computed as one: their arguments joined along the batch dimension, the output split.

A call is for a single image, so its batch has one row, or two where a pipeline computes the guided and the unguided
image together. A value with that many entries is a batch; everything else must be the same in every call. Only a
sequence with a mask (`encoder_hidden_states`, `encoder_hidden_states_mask`) can have another length in each: it is
padded. An object is the same in two calls if it is one object, or has the same plain values and no tensors, such as an
empty cache. Knows no module and no pipeline.
"""

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F

_KEPT_TENSORS = 64
_MAX_DEPTH = 8
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class CannotSplitError(Exception):
    """An output has a value of a type without known rows."""


class ArgumentChangedError(Exception):
    """The module has changed an argument: calls like this one can only be computed one by one."""


class RowParallelFunction(ABC):
    """A function of a batch whose rows can be computed in several places at once.

    Attributes:
        num_shares: How many.
    """

    num_shares: int

    @abstractmethod
    def compute_shares(self, shares: Sequence[tuple[tuple, dict[str, Any]]]) -> list[Any]:
        """The outputs of up to `num_shares` calls, given by their args and kwargs. Raises what a call raises."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute_shares([(args, kwargs)])[0]


class _Value:
    """The bits of a tensor: one object for all tensors that were found to be equal.

    Attributes:
        different: Values that are known to differ from this one.
    """

    def __init__(self) -> None:
        self.different: WeakSet[_Value] = WeakSet()


@dataclass(slots=True, eq=False)
class SharedTensor:
    """A tensor without rows, at the time of a call with it.

    Attributes:
        memory: Its address and version: two tensors that are alive and equal in this have equal contents.
        value: Replaced when it turns out to equal that of another tensor.
    """

    tensor: torch.Tensor
    memory: Hashable
    value: _Value = field(default_factory=_Value)


class SharedTensors:
    """The tensors without rows that one call of a pipeline passes to its networks: most of them again at every step.

    They are identified by their memory, without waiting for a device to compare contents. While a tensor is kept, no
    other can get its memory.
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
class CallBatch:
    """The batch dimension of a call.

    Attributes:
        num_rows: Its size.
        in_lists: Images are passed as a list, and so is everything of any length that belongs to one.
    """

    num_rows: int
    in_lists: bool

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self.num_rows

    def are_items_of(self, value: list) -> bool:
        """Whether a list has one entry for each row; false for a list of batches."""
        if len(value) != self.num_rows:
            return False
        return self.in_lists or not any(isinstance(item, torch.Tensor) and self.has(item) for item in value)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call that is to be computed.

    Attributes:
        function: Calls of different functions are never joined.
        batch: Its batch dimension.
        layout: Calls of equal layout can be computed as one if their shared tensors are equal.
        shared: Tensors without rows, which have to be equal, in the order of the arguments.
        objects: Objects that equal those of other calls, by their state.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    batch: CallBatch
    layout: Hashable
    shared: tuple[SharedTensor, ...] = ()
    objects: tuple[Any, ...] = ()

    @classmethod
    def describe(
        cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], tensors: SharedTensors
    ) -> "ModuleCall":
        """
        Args:
            tensors: Those of the pipeline's call.
        """
        leading = next((value for value in (*args, *kwargs.values()) if _leads(value)), None)
        batch = CallBatch(1 if leading is None else len(leading), in_lists=isinstance(leading, list))
        # Images of one batch have one size: padding a small one to a large one would cost more than it saves.
        sizes = tuple(tuple(image.shape) for image in leading) if isinstance(leading, list) else ()
        masked = _masked_sequences(kwargs, batch)
        others = {key: value for key, value in kwargs.items() if key not in (*masked, *masked.values())}
        shared: list[SharedTensor] = []
        objects: list[Any] = []

        def share(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                shared.append(tensors.find(value))
            else:
                objects.append(value)

        layout = (
            *(id(function), batch, sizes),
            *(_layout(args, batch, share), _layout(others, batch, share)),
            *((name, kwargs[name].shape[2], kwargs[name].dtype) for name in masked),
        )
        return cls(function, args, kwargs, batch, layout, tuple(shared), tuple(objects))


def find_joinable(call: ModuleCall, others: Sequence[ModuleCall]) -> list[bool]:
    """Whether each of these calls can be computed as one with `call`.

    Shared tensors whose equality is not known are compared bit by bit on their device; the CPU waits once for all.
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
    """Compares the tensors of each pair, of one shape, dtype and device."""
    equal = _are_equal([(a.tensor, b.tensor) for a, b in pairs])
    for (a, b), is_equal in zip(pairs, equal, strict=True):
        if is_equal:
            b.value = a.value
        else:
            a.value.different.add(b.value)
            b.value.different.add(a.value)


def _are_equal(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether the tensors of each pair, of one shape, dtype and device, have the same bits. Waits once for a device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, (tensor, _) in enumerate(pairs):
        by_device[tensor.device].append(index)
    equal = [False] * len(pairs)
    for indexes in by_device.values():
        found = torch.stack([(_as_bits(pairs[i][0]) == _as_bits(pairs[i][1])).all() for i in indexes])
        for index, is_equal in zip(indexes, found.tolist(), strict=True):
            equal[index] = is_equal
    return equal


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """-0.0 differs from 0.0, and a NaN equals itself."""
    tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_AS_BITS[plain.element_size()])


def compute(calls: Sequence[ModuleCall], *, copies_shared: bool = False) -> list[Any]:
    """The output of each of these calls, which have the same layout.

    Args:
        copies_shared: A module that changes a tensor without rows changes a copy.

    Raises:
        CannotSplitError, ArgumentChangedError: They can only be computed one by one.
        Exception: The function's.
    """
    first = calls[0]
    if len(calls) == 1:
        return [_call(first, first.args, first.kwargs, 1)]
    batch, num_calls = first.batch, len(calls)
    copies = {id(value): copy.deepcopy(value) for value in first.objects}

    def share(value: Any) -> Any:
        if copies_shared and isinstance(value, torch.Tensor):
            return value.clone()
        return copies.get(id(value), value)

    args = _join([call.args for call in calls], batch, share)
    kwargs: dict[str, Any] = {}
    masked = _masked_sequences(first.kwargs, batch)
    for name, mask_name in masked.items():
        sequences, masks = ([call.kwargs[key] for call in calls] for key in (name, mask_name))
        kwargs[name], kwargs[mask_name] = _pad(sequences, masks)
    for name in [name for name in first.kwargs if name not in kwargs]:  # In order.
        kwargs[name] = _join([call.kwargs[name] for call in calls], batch, share)
    versions = [(tensor, tensor._version) for tensor in _tensors((args, kwargs))]
    output = _call(first, args, kwargs, num_calls)
    if any(tensor._version != version for tensor, version in versions):
        raise ArgumentChangedError
    if any(_state(value) != _state(copies[id(value)]) for value in first.objects):
        raise ArgumentChangedError
    return _split(output, batch, num_calls)


def find_differing(calls: Sequence[ModuleCall], known: set[int]) -> set[int]:
    """The positions of values with rows that are not the same in all of these calls of one layout.

    Args:
        known: Positions that need no comparison. The others are compared bit by bit on their device, and the CPU waits.
    """
    first, *others = [list(_rows(call)) for call in calls]
    differing: set[int] = set()
    undecided: list[tuple[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for other in others:
        for position, (ours, theirs) in enumerate(zip(first, other, strict=True)):
            if position in known:
                continue
            if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
                differing.add(position)
            undecided += [(position, pair) for pair in zip(ours, theirs, strict=False) if pair[0] is not pair[1]]
    undecided = [(position, pair) for position, pair in undecided if position not in differing]
    equal = _are_equal([pair for _, pair in undecided])
    return differing | {position for (position, _), is_equal in zip(undecided, equal, strict=True) if not is_equal}


def count_rows(call: ModuleCall) -> int:
    """How many values with rows a call has: the positions of `find_differing`."""
    return sum(1 for _ in _rows(call))


def _rows(call: ModuleCall) -> Iterator[list[torch.Tensor]]:
    """The values with rows, in order: a tensor each, or those of a list; none of a mask that only other calls have."""
    masks = set(_masked_sequences(call.kwargs, call.batch).values())
    yield from _rows_in(call.args, call.batch)
    for name, value in call.kwargs.items():
        if value is None and name in masks:
            yield []
        yield from _rows_in(value, call.batch)


def _rows_in(value: Any, batch: CallBatch) -> Iterator[list[torch.Tensor]]:
    match value:
        case torch.Tensor() if value.ndim == 0 or batch.has(value):
            yield [value]
        case list() if batch.are_items_of(value):
            if tensors := list(_tensors(value)):
                yield tensors
        case list() | tuple():
            for item in value:
                yield from _rows_in(item, batch)
        case dict():
            yield from _rows_in(list(value.values()), batch)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dicts."""
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from _tensors(item)
        case dict():
            yield from _tensors(list(value.values()))


def _call(first: ModuleCall, args: tuple, kwargs: dict[str, Any], num_calls: int) -> Any:
    """The output of joined calls like the first; in shares of their rows, if the function takes them."""
    function, num_rows = first.function, first.batch.num_rows * num_calls
    num_shares = min(function.num_shares, num_rows) if isinstance(function, RowParallelFunction) else 1
    if num_shares == 1:
        return function(*args, **kwargs)
    shares, sizes, start = [], [], 0
    for index in range(num_shares):
        rows = slice(start, num_rows * (index + 1) // num_shares)
        share_of = partial(_rows_of, batch=first.batch, rows=rows)
        shares.append((share_of(args, first.args), {key: share_of(kwargs[key], first.kwargs[key]) for key in kwargs}))
        sizes.append(rows.stop - start)
        start = rows.stop
    assert isinstance(function, RowParallelFunction)
    return _concatenate(function.compute_shares(shares), sizes, first.batch.in_lists)


def _rows_of(joined: Any, first: Any, batch: CallBatch, rows: slice) -> Any:
    """Some rows of a value that `_join` or `_pad` has made of `first` and those of other calls."""
    match first:
        case torch.Tensor() if first.ndim == 0:
            return joined[rows] if joined.ndim else joined
        case torch.Tensor() if batch.has(first):
            return joined[rows]
        case list() if batch.are_items_of(first):
            return joined[rows]
        case list() | tuple():
            return type(first)(_rows_of(*pair, batch, rows) for pair in zip(joined, first, strict=True))
        case dict():
            return {key: _rows_of(joined[key], first[key], batch, rows) for key in first}
        case None if isinstance(joined, torch.Tensor):
            return joined[rows]  # the mask of sequences that only some calls have
        case _:
            return joined


def _concatenate(outputs: list[Any], sizes: list[int], in_lists: bool) -> Any:
    """The output of a batch, from those of shares with so many rows."""
    first = outputs[0]
    match first:
        case torch.Tensor() if first.ndim > 0 and [len(output) for output in outputs] == sizes:
            return torch.cat(outputs)
        case list() if CallBatch(sizes[0], in_lists).are_items_of(first):
            return [item for output in outputs for item in output]
        case list() | tuple():
            joined = [_concatenate(list(column), sizes, in_lists) for column in zip(*outputs, strict=True)]
            return joined if isinstance(first, list) else tuple(joined)
        case dict():
            fields = {key: _concatenate([output[key] for output in outputs], sizes, in_lists) for key in first}
            return type(first)(**fields)
        case None:
            return None
        case _:
            raise CannotSplitError(f"a {type(first).__name__} in the output of a share of a batch")


def _leads(value: Any) -> bool:
    """Whether it has a batch dimension; the first such argument defines the number of rows."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def _masked_sequences(kwargs: dict[str, Any], batch: CallBatch) -> dict[str, str]:
    """Arguments `[rows, length, features]` that have a mask `[rows, length]`, and the mask's name."""
    found = {}
    for name, value in kwargs.items():
        mask_name = f"{name}_mask"
        if mask_name in kwargs and isinstance(value, torch.Tensor) and value.ndim == 3 and batch.has(value):
            mask = kwargs[mask_name]
            if mask is None or (mask.shape == value.shape[:2] and not mask.is_floating_point()):
                found[name] = mask_name
    return found


def _pad(sequences: list[torch.Tensor], masks: list[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences `[rows, length, features]`, padded to the longest and joined, and their mask, if one is needed."""
    length = max(sequence.shape[1] for sequence in sequences)
    padded = [F.pad(sequence, (0, 0, 0, length - sequence.shape[1])) for sequence in sequences]
    if all(mask is None for mask in masks) and all(sequence.shape[1] == length for sequence in sequences):
        return torch.cat(padded), None
    full = [
        torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device) if mask is None else mask.bool()
        for sequence, mask in zip(sequences, masks, strict=True)
    ]
    return torch.cat(padded), torch.cat([F.pad(mask, (0, length - mask.shape[1])) for mask in full])


def _layout(value: Any, batch: CallBatch, share: Callable[[Any], None]) -> Hashable:
    match value:
        case torch.Tensor() if value.ndim == 0:
            return ("scalar", value.dtype)
        case torch.Tensor() if batch.has(value):
            return ("rows", tuple(value.shape[1:]), value.dtype)
        case torch.Tensor():
            share(value)
            return ("shared", tuple(value.shape), value.dtype, value.device)
        case list() if batch.are_items_of(value):
            return ("list", *(_item_layout(item, batch, share) for item in value))
        case list() | tuple():
            return (type(value), *(_layout(item, batch, share) for item in value))
        case dict():
            return ("dict", *((key, _layout(item, batch, share)) for key, item in value.items()))
        case _ if isinstance(value, _PLAIN):
            return ("plain", type(value), value)
        case _ if (state := _state(value)) is not None:
            share(value)
            return ("state", state)
        case _:
            return ("object", id(value))


def _state(value: Any, depth: int = 0) -> Hashable | None:
    """The plain values that an object of a Python class consists of; None if it has anything else, or is too deep."""
    match value:
        case _ if depth > _MAX_DEPTH:
            return None
        case _ if isinstance(value, _PLAIN):
            return (type(value), value)
        case list() | tuple():
            items: Any = value
        case dict():
            items = [*value, *value.values()]
        case _ if type(value).__bases__ == (object,) and hasattr(value, "__dict__") and not callable(value):
            items = [vars(value)]
        case _:
            return None
    states = tuple(_state(item, depth + 1) for item in items)
    return None if None in states else (type(value), *states)


def _item_layout(item: Any, batch: CallBatch, share: Callable[[Any], None]) -> Hashable:
    """The layout of a row's item. Plain values have to be equal: a network may read those of the first row only."""
    if not isinstance(item, torch.Tensor):
        return _layout(item, batch, share)
    return ("item", item.dtype, None if batch.in_lists else tuple(item.shape))


def _join(values: list[Any], batch: CallBatch, share: Callable[[Any], Any]) -> Any:
    """`share` makes of a value that is for all calls what is passed in its place."""
    first = values[0]
    match first:
        case torch.Tensor() if first.ndim == 0:
            return torch.cat([value.expand(batch.num_rows) for value in values])
        case torch.Tensor() if batch.has(first):
            return torch.cat(values)
        case list() if batch.are_items_of(first):
            return [item for value in values for item in value]
        case list() | tuple():
            return type(first)(_join([value[i] for value in values], batch, share) for i in range(len(first)))
        case dict():
            return {key: _join([value[key] for value in values], batch, share) for key in first}
        case _:
            return share(first)


_CACHES = ("cache", "past_key_values")
"""The field's name from transformers 5.24 on, and before."""


def _split(output: Any, batch: CallBatch, num_calls: int) -> list[Any]:
    """The parts of an output that belong to each call."""
    count = batch.num_rows
    match output:
        case torch.Tensor() if output.ndim > 0 and output.shape[0] == count * num_calls:
            return list(output.split(count))
        case list() if CallBatch(count * num_calls, batch.in_lists).are_items_of(output):
            return [output[i * count : (i + 1) * count] for i in range(num_calls)]
        case list() | tuple():
            columns = [_split(item, batch, num_calls) for item in output]
            parts = ((column[i] for column in columns) for i in range(num_calls))
            return [list(part) if isinstance(output, list) else tuple(part) for part in parts]
        case dict():  # the output classes of transformers and diffusers are dicts, too
            # Pipelines read an encoder's states; its cache, which cannot be split, is for generating text.
            fields = {key: _split(item, batch, num_calls) for key, item in output.items() if key not in _CACHES}
            return [type(output)(**{key: field[i] for key, field in fields.items()}) for i in range(num_calls)]
        case None:
            return [None] * num_calls
        case _:
            raise CannotSplitError(f"a {type(output).__name__} in the output of a batch")
