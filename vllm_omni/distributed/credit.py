# SPDX-License-Identifier: Apache-2.0
"""What may wait in a stage: its feeders count what they send, and it gives back what it has begun with.

A feeder that has spent its credit begins nothing new for that stage; what it has begun it finishes, and delivers. Only
what waits for the stage's engine is kept back: data that waits for another source, or that a running request needs, is
given back at once. So nobody ever waits for somebody who waits for him, and nothing is dropped.
"""

_BATCHES = 4
"""Parts of the credit that are given back at a time: fewer messages, and no stop and go."""


class Credit:
    """The feeder's side: what one stage may be sent."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max(1, max_requests)
        self._max_bytes = max_bytes
        self._num_requests = 0
        self._num_bytes = 0

    @property
    def is_spent(self) -> bool:
        return self._num_requests >= self._max_requests or self._num_bytes >= self._max_bytes

    def spend(self, num_requests: int, num_bytes: int) -> None:
        self._num_requests += num_requests
        self._num_bytes += num_bytes

    def refund(self, num_requests: int, num_bytes: int) -> None:
        # Of a process that is no more somebody may give back what its successor has never spent.
        self._num_requests = max(0, self._num_requests - num_requests)
        self._num_bytes = max(0, self._num_bytes - num_bytes)

    def reset(self) -> None:
        """The stage has a new process, in which nothing waits."""
        self._num_requests = 0
        self._num_bytes = 0


class Refund:
    """The stage's side: what is to be given back to one feeder."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._min_requests = max(1, max_requests) / _BATCHES
        self._min_bytes = max_bytes / _BATCHES
        self._num_requests = 0
        self._num_bytes = 0

    def add(self, num_requests: int, num_bytes: int) -> None:
        self._num_requests += num_requests
        self._num_bytes += num_bytes

    def take_due(self) -> tuple[int, int] | None:
        """Requests and bytes to give back now, if it is worth a message."""
        if self._num_requests < self._min_requests and self._num_bytes < self._min_bytes:
            return None
        due = self._num_requests, self._num_bytes
        self._num_requests = self._num_bytes = 0
        return due
