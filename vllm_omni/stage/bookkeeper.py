# SPDX-License-Identifier: Apache-2.0
"""What a stage's shell keeps count of: how requests end, how long it was blocked, and when to say so."""

import time

from vllm_omni.metrics.observer import COMPLETED
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.stage.request_state import RequestState

_STATS_INTERVAL_S = 1.0


class Bookkeeper:
    """
    Attributes:
        recorder: Where single figures go.
        due: When the stage's figures are to be sent (`time.monotonic()`); None while nothing has changed.
    """

    def __init__(self, recorder: StageRecorder, tracer: StageTracer) -> None:
        self.recorder = recorder
        self.due: float | None = None
        self._tracer = tracer
        self._blocked_since: float | None = None

    def completed(self, state: RequestState) -> None:
        self.recorder.completed()
        self._trace(state, COMPLETED)

    def aborted(self, state: RequestState) -> None:
        state.metrics.finished = time.monotonic()
        self.recorder.aborted()
        self._trace(state, "aborted")

    def failed(self, state: RequestState | None, cause: str) -> None:
        """
        Args:
            state: None for a request that the stage has forgotten, or has never understood.
            cause: The name of an error class.
        """
        self.recorder.failed(cause)
        if state is not None:
            state.metrics.finished = time.monotonic()
            self._trace(state, cause)

    def note_blocking(self, is_blocked: bool) -> None:
        """Whether the stage could begin something, if a consumer had room for it."""
        if is_blocked and self._blocked_since is None:
            self._blocked_since = time.monotonic()
        elif not is_blocked and self._blocked_since is not None:
            self.recorder.blocked(time.monotonic() - self._blocked_since)
            self._blocked_since = None

    def note_work(self) -> None:
        """Something has changed: the figures are sent within a second, where they are kept."""
        if self.recorder.enabled and self.due is None:
            self.due = time.monotonic() + _STATS_INTERVAL_S

    def _trace(self, state: RequestState, outcome: str) -> None:
        self._tracer.stage_done(state.request_id, state.request.trace_headers, state.metrics, outcome)
