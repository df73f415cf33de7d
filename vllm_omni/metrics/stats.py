# SPDX-License-Identifier: Apache-2.0
"""The figures of one stage, as it sends them to the orchestrator, and of one request there.

Counts and seconds of a stage are totals since its process started; a rate is the difference of two snapshots. Knows
neither how they are gathered (`recorder`) nor where they are shown (`table`, `prometheus`).
"""

import msgspec


class StageMetrics(msgspec.Struct, kw_only=True):
    """What one stage did for one request. Times are `time.monotonic()` seconds, comparable on one machine.

    Attributes:
        arrival: Enough input of the request had reached the stage to begin with it.
        started: It was handed to the engine.
        first_output: The first piece of output was there; None where the output came in one piece.
        finished: The engine was done with the request.
        num_input_tokens, num_output_tokens: Rows read and tokens written (0 where a stage has none).
        num_chunks: Pieces in which the output left the engine.
    """

    stage_id: int
    name: str
    arrival: float = 0.0
    started: float = 0.0
    first_output: float | None = None
    finished: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_chunks: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from `arrival` to the end."""
        return self.finished - self.arrival


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
