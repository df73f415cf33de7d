# SPDX-License-Identifier: Apache-2.0
"""Credit limits what waits in a stage: its sources spend it, and the stage returns it when it starts a request.

A source that has spent its credit starts no new request for that stage; requests that it has started it finishes and
delivers. Credit is withheld only for requests that wait for the stage's engine: for data that waits for another source,
or that a running request needs, it is returned immediately. So there is no cycle of waiting, and nothing is dropped.
"""

_BATCHES = 4
"""Credit is returned in this many parts: fewer messages, and the source need not stop in between."""


class Credit:
    """The source's side: limits what is sent to one stage."""

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
        # A refund that was meant for a process that died may exceed what its successor has spent.
        self._num_requests = max(0, self._num_requests - num_requests)
        self._num_bytes = max(0, self._num_bytes - num_bytes)

    def reset(self) -> None:
        """The stage has a new process, in which nothing waits yet."""
        self._num_requests = 0
        self._num_bytes = 0


class Refund:
    """The stage's side: credit to be returned to one source."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._min_requests = max(1, max_requests) / _BATCHES
        self._min_bytes = max_bytes / _BATCHES
        self._num_requests = 0
        self._num_bytes = 0

    def add(self, num_requests: int, num_bytes: int) -> None:
        self._num_requests += num_requests
        self._num_bytes += num_bytes

    def reset(self) -> None:
        """The source's process has died."""
        self._num_requests = self._num_bytes = 0

    def take_due(self) -> tuple[int, int] | None:
        """Requests and bytes to return now; None while there are too few for a message."""
        if self._num_requests < self._min_requests and self._num_bytes < self._min_bytes:
            return None
        due = self._num_requests, self._num_bytes
        self._num_requests = self._num_bytes = 0
        return due
