# SPDX-License-Identifier: Apache-2.0
"""Counts what a stage does, inside its process.

A stage makes a `StageRecorder` or a `NullRecorder` in its constructor and calls it without asking which it has. Takes
no time itself: callers measure, and may skip that where `enabled` is false.
"""

import msgspec

from vllm_omni.metrics.stats import EdgeStats, StageStats


class StageRecorder:
    """The running totals of one stage.

    `step` belongs to the engine's thread and everything else to the IO thread. Each figure has one writer, so there is
    no lock; a snapshot may miss the step that is just being counted.

    Attributes:
        enabled: Whether figures are kept; where not, callers need not measure.
    """

    enabled = True

    def __init__(self, stage_id: int, name: str) -> None:
        self._stats = StageStats(stage_id=stage_id, name=name)

    def enqueued(self) -> None:
        """A request has all that it needs to begin, and waits for the engine."""
        self._stats.num_enqueued += 1

    def dequeued(self) -> None:
        """A request was handed from the queue to the engine."""
        self._stats.num_dequeued += 1

    def completed(self) -> None:
        self._stats.num_completed += 1

    def aborted(self) -> None:
        self._stats.num_aborted += 1

    def failed(self, cause: str) -> None:
        """A request failed here.

        Args:
            cause: The name of an error class: few different values, since each becomes a time series.
        """
        failures = self._stats.failures
        failures[cause] = failures.get(cause, 0) + 1

    def blocked(self, seconds: float) -> None:
        """For this long the stage began nothing new, because a consumer was above its watermark."""
        self._stats.blocked_seconds += seconds

    def received(self, source: int, num_bytes: int, seconds: float) -> None:
        """A payload arrived from stage `source`, `seconds` after it was sent."""
        edge = self._edge(source)
        edge.num_payloads += 1
        edge.num_bytes += num_bytes
        edge.seconds += seconds

    def window(self, source: int) -> None:
        """A window of what stage `source` made was handed to this stage."""
        self._edge(source).num_windows += 1

    def step(self, seconds: float, batch_size: int) -> None:
        """The engine ran one step on `batch_size` requests."""
        self._stats.num_steps += 1
        self._stats.step_seconds += seconds
        self._stats.num_scheduled += batch_size

    def snapshot(self, queue_depth: int, num_running: int, kv_blocks: tuple[int, int] = (0, 0)) -> StageStats:
        """A copy of the totals, with what only the caller knows.

        Args:
            queue_depth: Requests that wait for the engine.
            num_running: Requests that the engine holds.
            kv_blocks: KV cache blocks that are held, and that there are.
        """
        used, total = kv_blocks
        return msgspec.structs.replace(
            self._stats,
            queue_depth=queue_depth,
            num_running=num_running,
            failures=dict(self._stats.failures),
            kv_blocks_used=used,
            kv_blocks_total=total,
            edges={source: msgspec.structs.replace(edge) for source, edge in self._stats.edges.items()},
        )

    def _edge(self, source: int) -> EdgeStats:
        return self._stats.edges.setdefault(source, EdgeStats())


class NullRecorder(StageRecorder):
    """Keeps nothing; its snapshots hold what the caller passes and otherwise zeros."""

    enabled = False

    def enqueued(self) -> None:
        pass

    def dequeued(self) -> None:
        pass

    def completed(self) -> None:
        pass

    def aborted(self) -> None:
        pass

    def failed(self, cause: str) -> None:
        pass

    def blocked(self, seconds: float) -> None:
        pass

    def received(self, source: int, num_bytes: int, seconds: float) -> None:
        pass

    def window(self, source: int) -> None:
        pass

    def step(self, seconds: float, batch_size: int) -> None:
        pass
