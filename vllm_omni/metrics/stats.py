# SPDX-License-Identifier: Apache-2.0
"""The figures of one stage, as it sends them to the orchestrator.

All counts and seconds are totals since the stage's process started; a rate is the difference of two snapshots. Knows
neither how they are gathered (`recorder`) nor where they are shown (`table`, `prometheus`).
"""

import msgspec


class EdgeStats(msgspec.Struct, kw_only=True):
    """What came to a stage from one of its sources.

    Attributes:
        num_payloads, num_bytes: Payloads that arrived, and their size.
        seconds: Time from sending to receipt, summed over the payloads.
        num_windows: Windows that were handed to the stage; one for each request where the edge does not stream.
    """

    num_payloads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_windows: int = 0


class StageStats(msgspec.Struct, kw_only=True):
    """A snapshot of one stage.

    Attributes:
        queue_depth: Requests that have all they need to begin, and wait for the engine.
        num_running: Requests that the engine holds.
        num_enqueued, num_dequeued: Requests that entered that queue, and that were taken from it by the engine.
        num_completed, num_aborted: How requests ended here; `failures` counts the others by cause.
        failures: Number of failed requests by cause, the name of an error class.
        blocked_seconds: Time in which the stage began nothing new because a consumer was above its watermark.
        num_steps, step_seconds: Engine steps, and the time that they took.
        num_scheduled: Batch sizes of all steps, summed.
        kv_blocks_used, kv_blocks_total: KV cache blocks held, and there are; 0 where the engine has none.
        edges: What came from each source, by stage id.
    """

    stage_id: int
    name: str
    queue_depth: int = 0
    num_running: int = 0
    num_enqueued: int = 0
    num_dequeued: int = 0
    num_completed: int = 0
    num_aborted: int = 0
    failures: dict[str, int] = {}
    blocked_seconds: float = 0.0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_scheduled: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    edges: dict[int, EdgeStats] = {}
