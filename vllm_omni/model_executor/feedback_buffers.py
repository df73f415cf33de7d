# SPDX-License-Identifier: Apache-2.0
"""Buffers of feedback strategies: rows of many requests in one tensor, read and written for all of a step at once.

A buffer grows on demand, is reused by the slot's next request, and never shrinks. Indices are not checked: nothing here
waits for the device. This file knows no model and no runner.
"""

from collections.abc import Sequence

import torch

_FIRST_CAPACITY = 64


def with_room_for(tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """`[slots, ...]` with an entry for this slot: the tensor itself, or a longer copy with zeros at its end."""
    num_slots = tensor.shape[0]
    if slot < num_slots:
        return tensor
    grown = tensor.new_zeros(max(2 * num_slots, slot + 1), *tensor.shape[1:])
    grown[:num_slots] = tensor
    return grown


class SlotBuffer:
    """A row for each index of each slot, `[*row_shape]` each. Rows that were not written are undefined."""

    def __init__(
        self, row_shape: tuple[int, ...], num_slots: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """
        Args:
            num_slots: The initial number of slots.
        """
        self._rows = torch.zeros(num_slots, _FIRST_CAPACITY, *row_shape, dtype=dtype, device=device)

    def reserve(self, slot: int, capacity: int) -> None:
        """Allocates memory for a slot, and for `capacity` rows in every slot."""
        self._rows = with_room_for(self._rows, slot)
        num_slots, known = self._rows.shape[:2]
        if capacity > known:
            grown = self._rows.new_zeros(num_slots, max(2 * known, capacity), *self._rows.shape[2:])
            grown[:, :known] = self._rows
            self._rows = grown

    def write(self, slots: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes `[N, *row_shape]` rows.

        Args:
            slots, indices: `[N]` int64 each, on the device, within what was reserved.
        """
        self._rows[slots, indices] = rows

    def read(self, slots: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """`[N, *row_shape]`, the rows at `[N]` int64 slots and indices, on the device."""
        return self._rows[slots, indices]


class SlotRows(SlotBuffer):
    """Lists of rows that grow at their end. Reading beyond the end gives the padding row."""

    def __init__(self, num_slots: int, padding: torch.Tensor) -> None:
        """
        Args:
            num_slots: The initial number of slots.
            padding: `[*row_shape]`, on the device and in the rows' dtype.
        """
        super().__init__(tuple(padding.shape), num_slots, dtype=padding.dtype, device=padding.device)
        self._padding = padding
        self._sizes: list[int] = []
        self._ends = torch.zeros(num_slots, dtype=torch.int64, device=padding.device)

    def size(self, slot: int) -> int:
        """Rows of a slot in use."""
        return self._sizes[slot]

    def begin(self, slot: int) -> None:
        """Empties a slot, which can be a new one."""
        self.reserve(slot, 1)
        self._ends = with_room_for(self._ends, slot)
        self._sizes += [0] * (len(self._ends) - len(self._sizes))
        self._end_at(slot, 0)

    def append(self, slot: int, rows: torch.Tensor) -> None:
        """
        Args:
            rows: `[n, *row_shape]`, on the device; `n` may be 0.
        """
        start, stop = self._sizes[slot], self._sizes[slot] + rows.shape[0]
        self.reserve(slot, stop + 1)  # and the padding
        self._rows[slot, start:stop] = rows
        self._end_at(slot, stop)

    def extend(self, rows: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Appends to several slots, or to none: reserves memory for all before it changes a row.

        Args:
            rows: Slots, of which one may come more than once, and what to append to each, as in `append`.
        """
        sizes: dict[int, int] = {}
        for slot, new in rows:
            sizes[slot] = sizes.get(slot, self._sizes[slot]) + len(new)
        for slot, size in sizes.items():
            self.reserve(slot, size + 1)
        for slot, new in rows:
            self.append(slot, new)

    def read(self, slots: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """`[N, *row_shape]`, the rows at `[N]` int64 slots and indices, on the device."""
        return super().read(slots, torch.minimum(indices, self._ends[slots]))

    def _end_at(self, slot: int, size: int) -> None:
        self._sizes[slot] = size
        self._ends[slot] = size
        self._rows[slot, size] = self._padding
