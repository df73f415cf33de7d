# SPDX-License-Identifier: Apache-2.0
"""Statistics of a stage and of its engine, as it sends them to the orchestrator, and metrics of one request in a stage.

Counts and seconds of a stage are totals since its process started; a rate is the difference of two snapshots.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from vllm_omni.control import DEFAULT_WEIGHT_VERSION

COMPLETED = "completed"
"""Outcome of a request. Other outcomes are `aborted` (in a stage) and names of error classes."""


class StageMetrics(msgspec.Struct, kw_only=True):
    """What one stage did for one request. Times are `time.monotonic()` seconds, comparable on one machine.

    Attributes:
        name, replica: Of the replica that did it: `talker`, or `talker.1` where there are several.
        arrival: Enough input of the request had arrived to start it.
        started: It was passed to the engine.
        first_output: The first piece of output was available; None where the output came in one piece.
        finished: The engine had finished the request.
        num_input_tokens, num_output_tokens: Rows read and tokens written (0 where a stage has none).
        num_cached_tokens: Of the first, those that the engine found in its prefix cache.
        num_chunks: Pieces in which the output left the engine.
        weight_version: Of the weights that it was made with.
    """

    stage_id: int
    name: str
    replica: int = 0
    arrival: float = 0.0
    started: float = 0.0
    first_output: float | None = None
    finished: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0
    weight_version: str = DEFAULT_WEIGHT_VERSION

    @property
    def seconds(self) -> float:
        """Seconds from `arrival` to `finished`."""
        return self.finished - self.arrival


@dataclass
class SpeculationCounts:
    """Answers of realtime sessions that were begun at a pause, before the user's turn had ended.

    Attributes:
        started: All.
        promoted: Those whose turn had ended, and that were sent.
        wasted_tokens: Of the texts of the others.
    """

    started: int = 0
    promoted: int = 0
    wasted_tokens: int = 0


class StageState(Enum):
    STARTING = "starting"
    """The process loads the model."""
    READY = "ready"
    """It takes requests."""
    UNRESPONSIVE = "unresponsive"
    """It was ready, and its process does not answer any more. What is sent to it waits until it does, or is killed."""
    OUTDATED = "outdated"
    """Its weights are not those of the pipeline: it takes no requests before the next update of them."""
    RESTARTING = "restarting"
    """The process died, and the next one is due or loading."""
    DEAD = "dead"
    """The process died too often; the stage's requests fail until the next one is ready."""


@dataclass(frozen=True, slots=True)
class StageHealth:
    """The state of a replica of a stage.

    Attributes:
        name, replica: `writer`, or `writer.1` where there are several.
        state: `starting`, `ready`, `unresponsive`, `outdated`, `restarting` or `dead`.
        num_restarts: How often its process was replaced.
        last_death: How its last process ended; empty if none has.
        node: The machine that it is on; empty without a cluster.
        waits_for: What is missing for its next process; empty if nothing is.
        weight_version: Of its weights; empty: not known.
    """

    stage_id: int
    name: str
    replica: int
    state: str
    num_restarts: int = 0
    last_death: str = ""
    node: str = ""
    waits_for: str = ""
    weight_version: str = DEFAULT_WEIGHT_VERSION


class CacheCounts(msgspec.Struct, kw_only=True, frozen=True):
    """Items that were looked for in a cache, and those that were found."""

    queries: int = 0
    hits: int = 0

    def __add__(self, other: "CacheCounts") -> "CacheCounts":
        return CacheCounts(queries=self.queries + other.queries, hits=self.hits + other.hits)


class EdgeStats(msgspec.Struct, kw_only=True):
    """What a stage received from one of its sources.

    Attributes:
        num_payloads, num_bytes: Payloads that arrived, and their size.
        seconds: Time from sending to receipt, summed over the payloads.
        num_windows: Windows passed to the stage; one for each request where the edge does not stream.
    """

    num_payloads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_windows: int = 0


class MetricFamily(msgspec.Struct, kw_only=True):
    """A Prometheus metric of an engine, with its values.

    Attributes:
        kind: `gauge`, `counter` or `histogram`.
        samples: Name, labels and value of each. A histogram has several names.
    """

    name: str
    documentation: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class StageStats(msgspec.Struct, kw_only=True):
    """A snapshot of one replica of a stage.

    Attributes:
        name, replica: `talker`, or `talker.1` where there are several.
        queue_depth: Requests that have enough input to start, and wait for the engine.
        num_running: Requests in the engine.
        num_enqueued, num_dequeued: Requests that entered that queue, and that the engine took from it.
        num_completed, num_aborted: Requests by outcome; `failures` counts the others.
        failures: Number of failed requests by cause, the name of an error class.
        blocked_seconds: Time in which the stage started no request because a consumer was above its watermark.
        num_steps, step_seconds: Engine steps, and their duration, summed.
        num_scheduled: Batch sizes of all steps, summed.
        kv_blocks_used, kv_blocks_total: KV cache blocks in use, and of the engine; 0 where it has none.
        resident_bytes: Of its process, and of its agent, in RAM, with what they share with others.
        device_bytes: That torch's allocator holds on the devices of its process; 0 where it has none.
        caches: Of the engine, by name: `encoder`, of encoded media; `prompt`, of encoded prompts.
        unbatched: Networks of a diffusion stage whose calls are not batched, since requests would change each other's
            outputs.
        edges: What came from each source, by stage id.
    """

    stage_id: int
    name: str
    replica: int = 0
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
    resident_bytes: int = 0
    device_bytes: int = 0
    caches: dict[str, CacheCounts] = {}
    unbatched: list[str] = []
    edges: dict[int, EdgeStats] = {}
