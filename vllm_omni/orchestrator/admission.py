# SPDX-License-Identifier: Apache-2.0
"""Limits the requests of a pipeline: those in flight, and those that wait.

Callers put requests from any thread; the orchestrator takes them.
"""

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_omni.errors import PipelineClosedError, PipelineFullError
from vllm_omni.orchestrator.request import PipelineRequest

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class Admission:
    """A bounded queue, by priority and in order of arrival.

    A request counts from `put` until `release`, when its caller has received its last event; one of several sequences
    as so many requests. One with more sequences than fit is admitted alone.
    """

    def __init__(self, max_inflight: int, max_queued: int) -> None:
        self._max_queued = max_queued
        self._limit = max_inflight + max_queued
        self._waiting: deque[PipelineRequest] = deque()
        self._open: dict[str, int] = {}  # the sequences of each request
        self._changed = threading.Condition()
        self._why_closed = ""
        self._last_release = time.monotonic()
        self._seconds_per_request = 0.0

    def put(self, request: PipelineRequest, wait: bool, cancelled: threading.Event | None = None) -> None:
        """
        Args:
            wait: Wait for room, instead of raising.
            cancelled: Ends the waiting when it is set. Its setter releases the request, queued or not.

        Raises:
            PipelineFullError: There is no room.
            PipelineClosedError: The pipeline is closed.
        """
        with self._changed:
            while wait and not self._has_room(request.num_sequences):
                if self._why_closed or (cancelled and cancelled.is_set()):
                    break
                self._changed.wait()
            self.check_room(num_sequences=request.num_sequences)
            if not self._open:
                self._last_release = time.monotonic()  # Nothing was asked for until now.
            self._open[request.request_id] = request.num_sequences
            bisect.insort(self._waiting, request, key=lambda waiting: waiting.priority)

    def check_room(self, num_coming: int = 0, num_sequences: int = 1) -> None:
        """Raises what `put` would raise without `wait` for a request of so many sequences, after `num_coming` of
        further requests."""
        with self._changed:  # reentrant
            if self._why_closed:
                raise PipelineClosedError(f"{self._why_closed}; make a new one")
            if not self._has_room(num_sequences, num_coming):
                count = sum(self._open.values()) + num_coming
                raise PipelineFullError(
                    f"the pipeline is full ({count} requests); try again later, or raise runtime.max_queued",
                    self._retry_after(),
                )

    def would_wait(self, num_coming: int = 0) -> bool:
        """Whether a request would not start at once, after `num_coming` sequences of further requests."""
        with self._changed:
            num_inflight = sum(self._open.values()) + num_coming
            return bool(self._waiting) or num_inflight >= self._limit - self._max_queued

    def peek(self, can_start: Callable[[PipelineRequest], bool] = lambda request: True) -> PipelineRequest | None:
        """The next request, of those that can start."""
        with self._changed:
            return next(filter(can_start, self._waiting), None)

    def waiting(self) -> list[PipelineRequest]:
        """The requests in the queue."""
        with self._changed:
            return list(self._waiting)

    def withdraw(self, request_id: str) -> PipelineRequest | None:
        """Removes a request from the queue, if it is still there."""
        with self._changed:
            for request in self._waiting:
                if request.request_id == request_id:
                    self._waiting.remove(request)
                    return request
        return None

    def release(self, request_id: str) -> None:
        """The caller has received the request's last event. No effect if it was released already."""
        with self._changed:
            if request_id in self._open:
                del self._open[request_id]
                self._note_release()
            # All of them: one may be waiting with the request that is cancelled here.
            self._changed.notify_all()

    def close(self, reason: str = "the pipeline was closed") -> list[PipelineRequest]:
        """Refuses further requests, for this reason; returns those that were waiting."""
        with self._changed:
            self._why_closed = reason
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
            return waiting

    def _has_room(self, num_sequences: int, num_coming: int = 0) -> bool:
        count = sum(self._open.values()) + num_coming
        return count + min(num_sequences, self._limit) <= self._limit

    def _note_release(self) -> None:
        now = time.monotonic()
        elapsed, self._last_release = now - self._last_release, now
        self._seconds_per_request += 0.1 * (elapsed - self._seconds_per_request)

    def _retry_after(self) -> float:
        """Seconds until about half of the waiting requests have been admitted."""
        seconds = self._seconds_per_request * max(1, self._max_queued // 2)
        return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)
