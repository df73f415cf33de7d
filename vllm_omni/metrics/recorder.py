# SPDX-License-Identifier: Apache-2.0
"""Counts what a stage does, inside its process."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from vllm_omni.metrics.stats import COMPLETED, CacheCounts, EdgeStats, StageStats

ABORTED = "aborted"
METRICS_INTERVAL_S = 1.0
"""Shortest time between two messages with an engine's metrics: some hundred numbers, which take 2 ms to read."""
INTERVAL_S = 0.05
"""Shortest time between two snapshots, but for those of a stage that becomes idle."""


class StageRecorder:
    """The running totals of one replica of a stage.

    The engine's thread calls `step`, the IO thread everything else. Each figure has one writer, so there is no lock; a
    snapshot may miss the step that is being counted.

    Attributes:
        due: When the next snapshot is to be sent (`time.monotonic()`); None while nothing has changed.
        metrics_due: The same for the engine's metrics.
    """

    def __init__(self, stage_id: int, name: str, replica: int = 0) -> None:
        self.due: float | None = None
        self.metrics_due: float | None = None
        self._stats = StageStats(stage_id=stage_id, name=name, replica=replica)
        self._blocked_since: float | None = None
        self._last_snapshot = self._last_metrics = float("-inf")

    def enqueued(self) -> None:
        """A request has enough input to start, and waits for the engine."""
        self._stats.num_enqueued += 1

    def dequeued(self) -> None:
        """A request was passed from the queue to the engine."""
        self._stats.num_dequeued += 1

    def ended(self, outcome: str) -> None:
        """A request ended here.

        Args:
            outcome: `COMPLETED`, `ABORTED`, or the name of an error class: few different values, since each becomes a
                time series.
        """
        if outcome == COMPLETED:
            self._stats.num_completed += 1
        elif outcome == ABORTED:
            self._stats.num_aborted += 1
        else:
            self._stats.failures[outcome] = self._stats.failures.get(outcome, 0) + 1

    def set_blocked(self, is_blocked: bool) -> None:
        """Whether only a consumer without room keeps the stage from starting a request."""
        if is_blocked and self._blocked_since is None:
            self._blocked_since = time.monotonic()
        elif not is_blocked and self._blocked_since is not None:
            self._stats.blocked_seconds += time.monotonic() - self._blocked_since
            self._blocked_since = None

    def received(self, source: int, num_bytes: int, seconds: float) -> None:
        """A payload arrived from stage `source`, `seconds` after it was sent."""
        edge = self._edge(source)
        edge.num_payloads += 1
        edge.num_bytes += num_bytes
        edge.seconds += seconds

    def window(self, source: int) -> None:
        """A window of the output of stage `source` was passed to this stage."""
        self._edge(source).num_windows += 1

    def step(self, seconds: float, batch_size: int) -> None:
        """The engine ran one step on `batch_size` requests."""
        self._stats.num_steps += 1
        self._stats.step_seconds += seconds
        self._stats.num_scheduled += batch_size

    def changed(self) -> None:
        """Something has changed: a snapshot is due, at once if the last one is old enough."""
        if self.due is None:
            self.due = max(time.monotonic(), self._last_snapshot + INTERVAL_S)

    def snapshot(
        self,
        queue_depth: int,
        num_running: int,
        kv_blocks: tuple[int, int] = (0, 0),
        caches: Mapping[str, CacheCounts] = MappingProxyType({}),
        unbatched: Sequence[str] = (),
        memory: tuple[int, int] = (0, 0),
    ) -> StageStats:
        """A copy of the totals, with current values from the caller.

        Args:
            queue_depth: Requests that wait for the engine.
            num_running: Requests in the engine.
            kv_blocks: KV cache blocks in use, and of the engine.
            caches, unbatched: As in `StageStats`.
            memory: `resident_bytes` and `device_bytes`.
        """
        self.due, self._last_snapshot = None, time.monotonic()
        if self.metrics_due is None:
            self.metrics_due = max(self._last_snapshot, self._last_metrics + METRICS_INTERVAL_S)
        used, total = kv_blocks
        return msgspec.structs.replace(
            self._stats,
            queue_depth=queue_depth,
            num_running=num_running,
            failures=dict(self._stats.failures),
            kv_blocks_used=used,
            kv_blocks_total=total,
            resident_bytes=memory[0],
            device_bytes=memory[1],
            caches=dict(caches),
            unbatched=list(unbatched),
            edges={source: msgspec.structs.replace(edge) for source, edge in self._stats.edges.items()},
        )

    def metrics_sent(self) -> None:
        """The engine's metrics were sent."""
        self.metrics_due, self._last_metrics = None, time.monotonic()

    def _edge(self, source: int) -> EdgeStats:
        return self._stats.edges.setdefault(source, EdgeStats())
