# SPDX-License-Identifier: Apache-2.0
"""Which metrics there are, what they are called and what they mean. Names are vLLM's where vLLM has the metric.

docs/observability.md lists them all; a test holds that. Counters are given the ending `_total` by Prometheus.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_omni.metrics.observer import RequestSummary
from vllm_omni.metrics.stats import EdgeStats, StageStats

PREFIX = "vllm_omni:"

_Stats = TypeVar("_Stats")

# Seconds of a request, seconds of a token (both as vLLM's), and completion time over length of the audio.
_REQUEST_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FACTOR_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 100.0)


@dataclass(frozen=True)
class Figure(Generic[_Stats]):
    """A gauge or a counter that is read off the figures of a stage or an edge."""

    name: str
    help: str
    value: Callable[[_Stats], float]


@dataclass(frozen=True)
class RequestHistogram:
    """Observed once for each completed request that has this value."""

    name: str
    help: str
    bounds: Sequence[float]
    value: Callable[[RequestSummary], float | None]


STAGE_GAUGES: tuple[Figure[StageStats], ...] = (
    Figure("num_requests_waiting", "Requests that wait for the stage's engine.", lambda s: s.queue_depth),
    Figure("num_requests_running", "Requests that the stage's engine holds.", lambda s: s.num_running),
    Figure("kv_blocks_used", "KV cache blocks that are held.", lambda s: s.kv_blocks_used),
    Figure("kv_blocks", "KV cache blocks that there are.", lambda s: s.kv_blocks_total),
)

STAGE_COUNTERS: tuple[Figure[StageStats], ...] = (
    Figure("stage_enqueued", "Requests that entered the stage's queue.", lambda s: s.num_enqueued),
    Figure("stage_dequeued", "Requests that the engine took from that queue.", lambda s: s.num_dequeued),
    Figure("stage_completed", "Requests that the stage completed.", lambda s: s.num_completed),
    Figure("stage_aborted", "Requests that were aborted while the stage had them.", lambda s: s.num_aborted),
    Figure(
        "stage_blocked_seconds", "Time with nothing new begun, as a consumer was full.", lambda s: s.blocked_seconds
    ),
    Figure("stage_steps", "Engine steps.", lambda s: s.num_steps),
    Figure("stage_step_seconds", "Time that engine steps took.", lambda s: s.step_seconds),
    Figure("stage_scheduled", "Batch sizes of all engine steps, summed.", lambda s: s.num_scheduled),
)

EDGE_COUNTERS: tuple[Figure[EdgeStats], ...] = (
    Figure("edge_payloads", "Payloads that came from the source.", lambda e: e.num_payloads),
    Figure("edge_bytes", "Bytes that came from the source.", lambda e: e.num_bytes),
    Figure("edge_seconds", "Time from sending to receipt, summed over payloads.", lambda e: e.seconds),
    Figure("edge_windows", "Windows of the source's output that the stage was handed.", lambda e: e.num_windows),
)

REQUEST_HISTOGRAMS = (
    RequestHistogram(
        "time_to_first_token_seconds", "From submission to the first text.", _REQUEST_BOUNDS, lambda r: r.ttft
    ),
    RequestHistogram(
        "request_time_per_output_token_seconds",
        "Mean time for each token of the text after its first.",
        _TOKEN_BOUNDS,
        lambda r: r.tpot,
    ),
    RequestHistogram(
        "time_to_first_audio_seconds", "From submission to the first audio.", _REQUEST_BOUNDS, lambda r: r.ttfa
    ),
    RequestHistogram(
        "time_to_first_image_seconds",
        "From submission to the first preview, image or video.",
        _REQUEST_BOUNDS,
        lambda r: r.ttfi,
    ),
    RequestHistogram(
        "e2e_request_latency_seconds", "From submission to completion.", _REQUEST_BOUNDS, lambda r: r.seconds
    ),
    RequestHistogram(
        "real_time_factor",
        "Completion time over the length of the audio.",
        _FACTOR_BOUNDS,
        lambda r: r.real_time_factor,
    ),
)
