# SPDX-License-Identifier: Apache-2.0
"""Buffers of feedback strategies: rows of many requests in one tensor, read and written for all of a step at once.

Rows are in pages of a pool, which is allocated at once, before the KV cache is sized, with a share for each slot. A
slot holds pages from its first row to its end, and may hold more than its share while others hold less. Only if no page
is left, because preempted requests keep theirs or many are very long, the pool grows. Indices are not checked: nothing
here waits for the device. This file knows no model and no runner.
"""

from collections.abc import Sequence

import torch

PAGE_SIZE = 128
"""Rows of a page."""


def with_room_for(tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """`[slots, ...]` with an entry for this slot: the tensor itself, or a longer copy with zeros at its end."""
    num_slots = tensor.shape[0]
    if slot < num_slots:
        return tensor
    grown = tensor.new_zeros(max(2 * num_slots, slot + 1), *tensor.shape[1:])
    grown[:num_slots] = tensor
    return grown


def _num_pages(num_rows: int) -> int:
    return -(-num_rows // PAGE_SIZE)


class SlotBuffer:
    """A row for each index of each slot, `[*row_shape]` each. Rows that were not written are undefined."""

    def __init__(
        self,
        row_shape: tuple[int, ...],
        num_slots: int,
        rows_per_slot: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            num_slots: Slots that usually exist; there can be more.
            rows_per_slot: A slot's share of the pool.
        """
        share = _num_pages(rows_per_slot)
        self._rows = torch.empty(num_slots * share * PAGE_SIZE, *row_shape, dtype=dtype, device=device)
        self._pages = torch.zeros(num_slots, share, dtype=torch.int64, device=device)  # by slot, those in `_held` first
        self._held: list[list[int]] = []
        self._free = list(range(num_slots * share))[::-1]

    @property
    def nbytes(self) -> int:
        """The size of the pool."""
        return self._rows.nbytes

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def reserve(self, slot: int, capacity: int) -> None:
        """Gives a slot pages for `capacity` rows. If it raises, for lack of memory, it has changed no row."""
        self._held += [[] for _ in range(slot + 1 - len(self._held))]
        held = self._held[slot]
        missing = _num_pages(capacity) - len(held)
        if missing <= 0:
            return
        self._pages = with_room_for(self._pages, slot)
        self._pages = with_room_for(self._pages.T, len(held) + missing - 1).T
        if missing > len(self._free):
            self._grow(missing - len(self._free))
        new = [self._free.pop() for _ in range(missing)]
        held += new
        self._pages[slot, len(held) - missing : len(held)] = torch.tensor(new).to(self._pages.device, non_blocking=True)

    def free(self, slot: int) -> None:
        """Takes a slot's pages, if it has any; its rows are gone."""
        if slot < len(self._held):
            self._free += reversed(self._held[slot])
            self._held[slot] = []

    def write(self, slots: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes `[N, *row_shape]` rows.

        Args:
            slots, indices: `[N]` int64 each, on the device, within what was reserved.
        """
        self._rows[self._places(slots, indices)] = rows

    def read(self, slots: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """`[N, *row_shape]`, the rows at `[N]` int64 slots and indices, on the device."""
        return self._rows[self._places(slots, indices)]

    def _places(self, slots: torch.Tensor | int, indices: torch.Tensor) -> torch.Tensor:
        """`[N]` int64, where these rows are in the pool."""
        return self._pages[slots, indices // PAGE_SIZE] * PAGE_SIZE + indices % PAGE_SIZE

    def _grow(self, num_pages: int) -> None:
        """Adds at least this number of pages."""
        known = len(self._rows) // PAGE_SIZE
        total = known + max(num_pages, known // 4)
        grown = self._rows.new_empty(total * PAGE_SIZE, *self._rows.shape[1:])
        grown[: len(self._rows)] = self._rows
        self._rows = grown
        self._free = [*range(total - 1, known - 1, -1), *self._free]


class SlotRows(SlotBuffer):
    """Lists of rows that grow at their end. Reading beyond the end gives the padding row."""

    def __init__(self, num_slots: int, rows_per_slot: int, padding: torch.Tensor) -> None:
        """
        Args:
            num_slots, rows_per_slot: As in `SlotBuffer`.
            padding: `[*row_shape]`, on the device and in the rows' dtype.
        """
        super().__init__(tuple(padding.shape), num_slots, rows_per_slot, dtype=padding.dtype, device=padding.device)
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
        if stop > start:
            self._rows[self._places(slot, torch.arange(start, stop, device=self._rows.device))] = rows
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
        self._rows[self._held[slot][size // PAGE_SIZE] * PAGE_SIZE + size % PAGE_SIZE] = self._padding
