# SPDX-License-Identifier: Apache-2.0
"""Metrics of pipelines and their stages in vLLM's Prometheus registry, so that they appear on its `/metrics` page.

Names are vLLM's where vLLM has the metric; docs/observability.md lists all of them, which a test checks. Counters get
the ending `_total` from Prometheus.

A registry takes each name once, so all pipelines of a process share one collector, which tells them apart by the label
`pipeline`: 0 for the first one, and so on. Samples are computed during a scrape, not before.
"""

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import (
    COMPLETED,
    CacheCounts,
    EdgeStats,
    MetricFamily,
    SpeculationCounts,
    StageHealth,
    StageState,
    StageStats,
)

PREFIX = "vllm_omni:"

# Seconds per request, seconds per token (both as vLLM's), and completion time divided by the length of the audio.
_REQUEST_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FACTOR_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 100.0)

# By name: help, and how the value is computed.
STAGE_GAUGES: dict[str, tuple[str, Callable[[StageStats], float]]] = {
    "num_requests_waiting": ("Requests waiting for the stage's engine.", lambda s: s.queue_depth),
    "num_requests_running": ("Requests in the stage's engine.", lambda s: s.num_running),
    "kv_blocks_used": ("KV cache blocks in use.", lambda s: s.kv_blocks_used),
    "kv_blocks": ("KV cache blocks of the engine.", lambda s: s.kv_blocks_total),
    "unbatched_networks": ("Networks whose calls are not batched.", lambda s: len(s.unbatched)),
    "stage_resident_memory_bytes": ("Memory of the stage's process in RAM.", lambda s: s.resident_bytes),
    "stage_device_memory_bytes": ("Memory of the stage's process on its devices.", lambda s: s.device_bytes),
}
STAGE_COUNTERS: dict[str, tuple[str, Callable[[StageStats], float]]] = {
    "stage_enqueued": ("Requests that entered the stage's queue.", lambda s: s.num_enqueued),
    "stage_dequeued": ("Requests that the engine took from that queue.", lambda s: s.num_dequeued),
    "stage_completed": ("Requests that the stage completed.", lambda s: s.num_completed),
    "stage_aborted": ("Requests that were aborted in the stage.", lambda s: s.num_aborted),
    "stage_blocked_seconds": ("Time without new requests because a consumer was full.", lambda s: s.blocked_seconds),
    "stage_steps": ("Engine steps.", lambda s: s.num_steps),
    "stage_step_seconds": ("Duration of engine steps, summed.", lambda s: s.step_seconds),
    "stage_scheduled": ("Batch sizes of all engine steps, summed.", lambda s: s.num_scheduled),
}
# Of each cache of a stage's engine, and, with the name `mm_...`, of the caller's cache of preprocessed media.
CACHE_COUNTERS: dict[str, tuple[str, Callable[[CacheCounts], float]]] = {
    "cache_queries": ("Items looked for in the cache.", lambda c: c.queries),
    "cache_hits": ("Items found in the cache.", lambda c: c.hits),
}
EDGE_COUNTERS: dict[str, tuple[str, Callable[[EdgeStats], float]]] = {
    "edge_payloads": ("Payloads received from the source.", lambda e: e.num_payloads),
    "edge_bytes": ("Bytes received from the source.", lambda e: e.num_bytes),
    "edge_seconds": ("Time from sending to receipt, summed over payloads.", lambda e: e.seconds),
    "edge_windows": ("Windows of the source's output passed to the stage.", lambda e: e.num_windows),
}
SPECULATION_COUNTERS: dict[str, tuple[str, Callable[[SpeculationCounts], float]]] = {
    "realtime_speculative_responses_started": ("Realtime answers begun at a pause of the user.", lambda c: c.started),
    "realtime_speculative_responses_promoted": ("Those whose turn had ended, which were sent.", lambda c: c.promoted),
    "realtime_speculative_responses_wasted_tokens": ("Tokens of the texts of the others.", lambda c: c.wasted_tokens),
}
# By name: help, bounds, and the value of a completed request, None if it has none.
REQUEST_HISTOGRAMS: dict[str, tuple[str, Sequence[float], Callable[[RequestSummary], float | None]]] = {
    "time_to_first_token_seconds": ("From submission to the first text.", _REQUEST_BOUNDS, lambda r: r.ttft),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _TOKEN_BOUNDS, lambda r: r.tpot),
    "time_to_first_audio_seconds": ("From submission to the first audio.", _REQUEST_BOUNDS, lambda r: r.ttfa),
    "time_to_first_image_seconds": (
        "From submission to the first preview or image.",
        _REQUEST_BOUNDS,
        lambda r: r.ttfi,
    ),
    "e2e_request_latency_seconds": ("From submission to completion.", _REQUEST_BOUNDS, lambda r: r.seconds),
    "real_time_factor": ("Completion time per length of the audio.", _FACTOR_BOUNDS, lambda r: r.real_time_factor),
}


class _Histogram:
    """Counts values by bucket. Written by one thread, read by any."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        totals = itertools.accumulate(list(self._counts))
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, totals, strict=True)), self._sum)


class PrometheusObserver(PipelineObserver):
    """Keeps the statistics of one pipeline for scrapes.

    Attributes:
        names: The names of all stages, by id.
        stages: The latest statistics of each replica, by stage id and replica.
        engines: The latest metrics of its engine, in the same way.
        outcomes: Number of requests by outcome and by the name of the stage that failed them, if one did.
        histograms: Values of completed requests, by metric name.
        health: Reads the state of each replica.
        media_cache: Reads the counts of the caller's cache.
        is_paused: Whether generation is paused.
        speculations: The counts of realtime sessions.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.names = {stage.stage_id: stage.name for stage in config.stage_args}
        self.stages: dict[tuple[int, int], StageStats] = {}
        self.engines: dict[tuple[int, int], list[MetricFamily]] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.histograms = {name: _Histogram(bounds) for name, (_, bounds, _) in REQUEST_HISTOGRAMS.items()}
        self.health: Callable[[], Sequence[StageHealth]] = tuple
        self.media_cache: Callable[[], CacheCounts] = CacheCounts
        self.is_paused: Callable[[], bool] = bool
        self.speculations = SpeculationCounts()
        _collector.add(self)

    def watch_health(self, read: Callable[[], Sequence[StageHealth]]) -> None:
        self.health = read

    def watch_pause(self, read: Callable[[], bool]) -> None:
        self.is_paused = read

    def watch_speculations(self, counts: SpeculationCounts) -> None:
        self.speculations = counts

    def watch_media_cache(self, read: Callable[[], CacheCounts]) -> None:
        self.media_cache = read

    def request_ended(self, summary: RequestSummary) -> None:
        self.outcomes[summary.outcome, summary.failed_stage or ""] += 1
        if summary.outcome != COMPLETED:
            return  # Histograms hold completed requests only.
        for name, (_, _, value_of) in REQUEST_HISTOGRAMS.items():
            value = value_of(summary)
            if value is not None:
                self.histograms[name].observe(value)

    def stage_stats(self, stats: StageStats) -> None:
        self.stages[stats.stage_id, stats.replica] = stats

    def engine_metrics(self, stage_id: int, replica: int, families: list[MetricFamily]) -> None:
        self.engines[stage_id, replica] = families

    def close(self) -> None:
        _collector.remove(self)


class _PipelinesCollector(Collector):
    """Collects the metrics of all pipelines of this process. Registered while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipelines: dict[int, PrometheusObserver] = {}
        self._registry: CollectorRegistry | None = None

    def add(self, pipeline: PrometheusObserver) -> None:
        with self._lock:
            number = next(i for i in itertools.count() if i not in self._pipelines)
            self._pipelines = {**self._pipelines, number: pipeline}  # a copy: `collect` may be reading the old one
            if self._registry is None:
                self._registry = get_prometheus_registry()
                self._registry.register(self)

    def remove(self, pipeline: PrometheusObserver) -> None:
        with self._lock:
            self._pipelines = {i: other for i, other in self._pipelines.items() if other is not pipeline}
            if not self._pipelines and self._registry is not None:
                self._registry.unregister(self)
                self._registry = None

    def describe(self) -> Iterable[Metric]:
        return _families([])

    def collect(self) -> Iterable[Metric]:
        return _families([(str(i), pipeline) for i, pipeline in self._pipelines.items()])


# One for the process, like the registry.
_collector = _PipelinesCollector()

_Pipelines = Sequence[tuple[str, PrometheusObserver]]


def _families(pipelines: _Pipelines) -> Iterator[Metric]:
    # Copies, because each pipeline's thread keeps writing.
    stages = [(number, p, stats) for number, p in pipelines for stats in list(p.stages.values())]
    yield from _health_families(pipelines)
    yield from _stage_families(stages)
    yield from _edge_families(stages)
    yield from _request_families(pipelines)
    yield from _media_cache_families(pipelines)
    yield from _speculation_families(pipelines)
    yield from _engine_families(pipelines)


def _health_families(pipelines: _Pipelines) -> Iterator[Metric]:
    labels = ["pipeline", "stage", "replica"]
    states = GaugeMetricFamily(f"{PREFIX}stage_state", "1 for the state of the stage.", labels=[*labels, "state"])
    paused = GaugeMetricFamily(f"{PREFIX}paused", "1 while generation is paused.", labels=["pipeline"])
    versions = GaugeMetricFamily(
        f"{PREFIX}weight_version", "1 for the version of the stage's weights.", labels=[*labels, "weight_version"]
    )
    restarts = CounterMetricFamily(f"{PREFIX}stage_restarts", "How often its process was replaced.", labels=labels)
    for number, pipeline in pipelines:
        for stage in pipeline.health():
            own = [number, pipeline.names[stage.stage_id], str(stage.replica)]
            for state in StageState:
                states.add_metric([*own, state.value], stage.state == state.value)
            versions.add_metric([*own, stage.weight_version], 1)
            restarts.add_metric(own, stage.num_restarts)
        paused.add_metric([number], pipeline.is_paused())
    yield from (states, versions, restarts, paused)


_Stages = Sequence[tuple[str, PrometheusObserver, StageStats]]


def _stage_families(stages: _Stages) -> Iterator[Metric]:
    labels = ["pipeline", "stage", "replica"]
    for kind, metrics in ((GaugeMetricFamily, STAGE_GAUGES), (CounterMetricFamily, STAGE_COUNTERS)):
        for name, (description, value_of) in metrics.items():
            family = kind(PREFIX + name, description, labels=labels)
            for number, pipeline, stats in stages:
                family.add_metric([number, *_labels(pipeline, stats)], value_of(stats))
            yield family
    failures = CounterMetricFamily(
        f"{PREFIX}stage_failures", "Requests that failed in the stage, by cause.", labels=[*labels, "cause"]
    )
    for number, pipeline, stats in stages:
        for cause, count in stats.failures.items():
            failures.add_metric([number, *_labels(pipeline, stats), cause], count)
    yield failures
    for name, (description, value_of_cache) in CACHE_COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, description, labels=[*labels, "cache"])
        for number, pipeline, stats in stages:
            for cache, counts in stats.caches.items():
                family.add_metric([number, *_labels(pipeline, stats), cache], value_of_cache(counts))
        yield family


def _labels(pipeline: PrometheusObserver, stats: StageStats) -> list[str]:
    return [pipeline.names[stats.stage_id], str(stats.replica)]


def _edge_families(stages: _Stages) -> Iterator[Metric]:
    for name, (description, value_of) in EDGE_COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, description, labels=["pipeline", "source", "stage", "replica"])
        for number, pipeline, stats in stages:
            for source, edge in stats.edges.items():
                family.add_metric([number, pipeline.names[source], *_labels(pipeline, stats)], value_of(edge))
        yield family


def _request_families(pipelines: _Pipelines) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        f"{PREFIX}requests",
        "Requests by outcome and by the stage that failed them.",
        labels=["pipeline", "outcome", "stage"],
    )
    for number, pipeline in pipelines:
        for (outcome, stage), count in list(pipeline.outcomes.items()):
            requests.add_metric([number, outcome, stage], count)
    yield requests
    for name, (description, _, _) in REQUEST_HISTOGRAMS.items():
        family = HistogramMetricFamily(PREFIX + name, description, labels=["pipeline"])
        for number, pipeline in pipelines:
            pipeline.histograms[name].add_to(family, [number])
        yield family


def _media_cache_families(pipelines: _Pipelines) -> Iterator[Metric]:
    for name, (description, value_of) in CACHE_COUNTERS.items():
        family = CounterMetricFamily(f"{PREFIX}mm_{name}", f"Media: {description.lower()}", labels=["pipeline"])
        for number, pipeline in pipelines:
            family.add_metric([number], value_of(pipeline.media_cache()))
        yield family


def _speculation_families(pipelines: _Pipelines) -> Iterator[Metric]:
    for name, (description, value_of) in SPECULATION_COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, description, labels=["pipeline"])
        for number, pipeline in pipelines:
            family.add_metric([number], value_of(pipeline.speculations))
        yield family


def _engine_families(pipelines: _Pipelines) -> Iterable[Metric]:
    """vLLM's own metrics, of all engines, with the labels of their stage."""
    merged: dict[str, Metric] = {}
    for number, pipeline in pipelines:
        for (stage_id, replica), families in list(pipeline.engines.items()):
            own = {"pipeline": number, "stage": pipeline.names[stage_id], "replica": str(replica)}
            for family in families:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.kind))
                for name, labels, value in family.samples:
                    metric.add_sample(name, {**labels, **own}, value)
    return merged.values()
