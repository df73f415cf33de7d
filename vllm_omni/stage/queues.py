# SPDX-License-Identifier: Apache-2.0
"""What a stage's IO thread looks up at each wake; the cost does not depend on how many requests there are."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from vllm_omni.stage.request_state import RequestState


class WaitingQueue:
    """Requests that wait for the engine, by priority and in order of arrival."""

    def __init__(self, has_room: Callable[[Sequence[int]], bool]) -> None:
        """
        Args:
            has_room: Whether these stages, which read a request's output, take more.
        """
        self._has_room = has_room
        self._queues: dict[tuple[int, tuple[int, ...]], OrderedDict[str, RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, state: RequestState) -> None:
        self._queues.setdefault(_queue_of(state), OrderedDict())[state.request_id] = state

    def remove(self, state: RequestState) -> None:
        queue = self._queues[_queue_of(state)]
        del queue[state.request_id]
        if not queue:
            del self._queues[_queue_of(state)]

    def first(self) -> RequestState | None:
        """The first request whose targets all have room: one that waits for a target does not block those behind it."""
        heads = [next(iter(queue.values())) for (_, targets), queue in self._queues.items() if self._has_room(targets)]
        return min(heads, key=lambda state: (state.request.priority, state.metrics.arrival), default=None)


def _queue_of(state: RequestState) -> tuple[int, tuple[int, ...]]:
    return state.request.priority, tuple(state.submit.targets)


class FlushTimes:
    """When the requests must send the output that they hold."""

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        """
        Args:
            requests: By id; those that have left it are forgotten here.
        """
        self._requests = requests
        # At most one entry per request. Its output may have been sent since: then the request's next time is later.
        self._heap: list[tuple[float, str]] = []
        self._entered: set[str] = set()

    def add(self, state: RequestState) -> None:
        """The engine has made output of the request."""
        due = state.outputs.due
        if due is not None and state.request_id not in self._entered:
            self._entered.add(state.request_id)
            heapq.heappush(self._heap, (due, state.request_id))

    @property
    def due(self) -> float | None:
        """When the first request must send (`time.monotonic()`); None while none has to."""
        while self._heap:
            when, request_id = self._heap[0]
            state = self._requests.get(request_id)
            due = None if state is None else state.outputs.due
            if due == when:
                return when
            if due is None:
                self._pop()
            else:
                heapq.heapreplace(self._heap, (due, request_id))
        return None

    def take_due(self, now: float) -> Iterator[RequestState]:
        """The requests that must send now."""
        while (due := self.due) is not None and due <= now:
            yield self._requests[self._pop()]

    def _pop(self) -> str:
        _, request_id = heapq.heappop(self._heap)
        self._entered.remove(request_id)
        return request_id
