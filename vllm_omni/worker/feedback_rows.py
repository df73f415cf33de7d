# SPDX-License-Identifier: Apache-2.0
"""Sorts the rows of a step: which belong to a prompt, which feed a sampled token back, and to which request.

Numbers on the host only: this file knows no model, no runner and no tensor.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

_FIRST_SLOTS = 16


class RequestSlots:
    """Slots of requests, lowest free number first, and how many frames have been made for each. The two sequences of a
    request with guidance have one slot.

    Attributes:
        num_frames: `[slots]` int64, tokens of the slot's request that have been fed back.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self.num_frames = np.zeros(_FIRST_SLOTS, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def req_ids(self) -> list[str]:
        return list(self._slots)

    @property
    def lowest_free(self) -> int:
        return self._free[0] if self._free else self._num_slots

    def take(self, req_id: str) -> int:
        """Gives a request the lowest free slot."""
        slot = heapq.heappop(self._free) if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        if slot == len(self.num_frames):
            self.num_frames = np.concatenate((self.num_frames, np.zeros_like(self.num_frames)))
        self._slots[req_id] = slot
        self.num_frames[slot] = 0
        return slot

    def share(self, req_id: str, slot: int) -> None:
        """Gives a sequence the slot that another one has taken."""
        self._slots[req_id] = slot

    def release(self, req_id: str) -> int | None:
        """Frees a request's slot and returns it; None if it had none, or shared it with one that has it still."""
        slot = self._slots.pop(req_id, None)
        if slot is None or slot in self._slots.values():
            return None
        heapq.heappush(self._free, slot)
        return slot

    def get(self, req_id: str) -> int | None:
        """None if it has none."""
        return self._slots.get(req_id)

    def __getitem__(self, req_id: str) -> int:
        return self._slots[req_id]

    def of(self, req_ids: Iterable[str]) -> np.ndarray:
        """`[N]` int64, KeyError where one has no slot."""
        return np.array([self._slots[req_id] for req_id in req_ids], dtype=np.int64)


class TokenRows(NamedTuple):
    """Rows of a step that feed a token back, `[N]` int64 each, in batch order.

    Attributes:
        rows: In the step's flat batch.
        requests: Their requests, by index in the batch.
        slots: Of these requests.
        frames: Tokens that the request had sampled before the one of this row.
    """

    rows: np.ndarray
    requests: np.ndarray
    slots: np.ndarray
    frames: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.rows)


class PromptRows(NamedTuple):
    """Rows `[start, stop)` of a prompt, from `row` of the step's flat batch on.

    Attributes:
        request: By index in the batch.
    """

    slot: int
    row: int
    start: int
    stop: int
    request: int


class StepRows(NamedTuple):
    """
    Attributes:
        prompts: For each request with prompt rows in this step.
        new: Rows of tokens that were not fed back yet.
        known: Rows of tokens that were: computed again because their request was preempted, or read by the other
            sequence of a request with guidance, too.
    """

    prompts: list[PromptRows]
    new: TokenRows
    known: TokenRows | None


def sort_rows(
    slots: np.ndarray, num_frames: np.ndarray, computed: np.ndarray, prompt: np.ndarray, counts: np.ndarray
) -> StepRows:
    """
    Args:
        slots: `[R]`, of the step's requests in batch order. Of two sequences with one slot the first in the batch feeds
            a token back, and the row of the other one is known.
        num_frames: By slot, as in `RequestSlots`.
        computed, prompt, counts: `[R]` each: the tokens computed before this step, of the prompt, and of this step.

    Raises:
        RuntimeError: A request has several rows whose token was not fed back yet: each needs the row before it.
    """
    frames = computed - prompt
    if (frames >= 0).all() and len(counts) == counts.sum():
        requests = rows = np.arange(len(counts))
        prompts: list[PromptRows] = []
    else:
        requests, rows, frames = _fed_back(computed, prompt, counts)
        prompts = _prompts(slots, computed, prompt, counts)
    fed = TokenRows(rows, requests, slots[requests], frames.astype(np.int64))
    is_known = fed.frames < num_frames[fed.slots]
    if len(set(slots.tolist())) < len(slots):
        is_known |= ~_is_first(fed)
    if not is_known.any():
        step = StepRows(prompts, fed, None)
    else:
        step = StepRows(prompts, *(TokenRows(*(part[mask] for part in fed)) for mask in (~is_known, is_known)))
    if (step.new.frames != num_frames[step.new.slots]).any():
        raise RuntimeError("a step holds several tokens of one request that were never fed back")
    return step


def _is_first(rows: TokenRows) -> np.ndarray:
    """`[N]` bool: no row before it has the same slot and frame."""
    is_first = np.zeros(rows.num_rows, dtype=bool)
    is_first[np.unique(np.stack((rows.slots, rows.frames)), axis=1, return_index=True)[1]] = True
    return is_first


def _fed_back(
    computed: np.ndarray, prompt: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests, rows and frames of all rows that are not of a prompt."""
    requests = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    rows = np.arange(len(requests))
    frames = rows - starts[requests] + (computed - prompt)[requests]
    fed = np.flatnonzero(frames >= 0)
    return requests[fed], fed, frames[fed]


def _prompts(slots: np.ndarray, computed: np.ndarray, prompt: np.ndarray, counts: np.ndarray) -> list[PromptRows]:
    starts, stops = np.cumsum(counts) - counts, np.minimum(computed + counts, prompt)
    return [
        PromptRows(int(slots[index]), int(starts[index]), int(computed[index]), int(stops[index]), int(index))
        for index in np.flatnonzero(computed < prompt)
    ]
