# SPDX-License-Identifier: Apache-2.0
"""The requests that wait in a stage for its engine: how many there may be, and who begins next."""

from collections.abc import Callable

from vllm_omni.stage.request_state import RequestState


class WaitingLine:
    """First come, first served; a request that may not begin yet does not hold up those behind it.

    The line never refuses anybody: what is sent to a stage is delivered. It says when there is too much in it, so that
    those who feed the stage wait, until half of that is left.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._states: dict[str, RequestState] = {}
        self._num_bytes = 0
        self.is_above = False

    def __len__(self) -> int:
        return len(self._states)

    def append(self, state: RequestState) -> None:
        state.is_queued = True
        self._states[state.request_id] = state
        self._num_bytes += state.num_waiting_bytes
        self._update()

    def add_bytes(self, num_bytes: int) -> None:
        """More has arrived for a request in the line."""
        self._num_bytes += num_bytes
        self._update()

    def remove(self, state: RequestState) -> None:
        state.is_queued = False
        del self._states[state.request_id]
        self._num_bytes -= state.num_waiting_bytes
        state.num_waiting_bytes = 0
        self._update()

    def take_next(self, may_begin: Callable[[RequestState], bool]) -> RequestState | None:
        """Removes and returns the first that may begin."""
        state = next((state for state in self._states.values() if may_begin(state)), None)
        if state is not None:
            self.remove(state)
        return state

    def _update(self) -> None:
        if len(self._states) > self._max_requests or self._num_bytes > self._max_bytes:
            self.is_above = True
        elif len(self._states) <= self._max_requests // 2 and self._num_bytes <= self._max_bytes // 2:
            self.is_above = False
