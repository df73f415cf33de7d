# SPDX-License-Identifier: Apache-2.0
"""The figures of pipelines and their stages in vLLM's Prometheus registry, so that they appear on its `/metrics` page.

A registry takes each name once, so all pipelines of a process share one collector, which tells them apart by the label
`pipeline`: 0 for the first one, and so on. Metrics are made when somebody scrapes, and not before. Which there are is
said in `prometheus_metrics`.
"""

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.metrics.observer import COMPLETED, PipelineObserver, RequestSummary
from vllm_omni.metrics.prometheus_metrics import (
    EDGE_COUNTERS,
    PREFIX,
    REQUEST_HISTOGRAMS,
    STAGE_COUNTERS,
    STAGE_GAUGES,
)
from vllm_omni.metrics.stats import StageStats


class _Histogram:
    """How many values lie below each bound. Written by one thread, read by any."""

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
    """Keeps the figures of one pipeline for whoever scrapes.

    Attributes:
        stages: The latest figures of each stage, by id.
        outcomes: Requests by how they ended, and the name of the stage that failed them, if one did.
        histograms: What is observed of each completed request, by metric name.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._names = {stage.stage_id: stage.name for stage in config.stage_args}
        self.stages: dict[int, StageStats] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.histograms = {metric.name: _Histogram(metric.bounds) for metric in REQUEST_HISTOGRAMS}
        _collector.add(self)

    def name_of(self, stage_id: int) -> str:
        return self._names[stage_id]

    def request_ended(self, summary: RequestSummary) -> None:
        self.outcomes[summary.outcome, summary.failed_stage or ""] += 1
        if summary.outcome != COMPLETED:
            return  # How long a request took to fail says nothing about how long one takes.
        for metric in REQUEST_HISTOGRAMS:
            value = metric.value(summary)
            if value is not None:
                self.histograms[metric.name].observe(value)

    def stage_stats(self, stats: StageStats) -> None:
        self.stages[stats.stage_id] = stats

    def close(self) -> None:
        _collector.remove(self)


class _PipelinesCollector(Collector):
    """What all pipelines of this process show. In the registry while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipelines: dict[int, PrometheusObserver] = {}
        self._registry: CollectorRegistry | None = None

    def add(self, pipeline: PrometheusObserver) -> None:
        with self._lock:
            number = next(i for i in itertools.count() if i not in self._pipelines)
            self._pipelines = {**self._pipelines, number: pipeline}  # `collect` may be reading the old one
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


# One for the process, as is the registry that it stands in.
_collector = _PipelinesCollector()

_Pipelines = Sequence[tuple[str, PrometheusObserver]]


def _families(pipelines: _Pipelines) -> Iterator[Metric]:
    # Copies, because each pipeline's thread goes on writing.
    stages = [(number, p, stats) for number, p in pipelines for stats in list(p.stages.values())]
    yield from _stage_families(stages)
    yield from _edge_families(stages)
    yield from _request_families(pipelines)


_Stages = Sequence[tuple[str, PrometheusObserver, StageStats]]


def _stage_families(stages: _Stages) -> Iterator[Metric]:
    labels = ["pipeline", "stage"]
    for kind, metrics in ((GaugeMetricFamily, STAGE_GAUGES), (CounterMetricFamily, STAGE_COUNTERS)):
        for metric in metrics:
            family = kind(PREFIX + metric.name, metric.help, labels=labels)
            for number, _, stats in stages:
                family.add_metric([number, stats.name], metric.value(stats))
            yield family
    failures = CounterMetricFamily(
        f"{PREFIX}stage_failures", "Requests that failed in the stage, by cause.", labels=[*labels, "cause"]
    )
    for number, _, stats in stages:
        for cause, count in stats.failures.items():
            failures.add_metric([number, stats.name, cause], count)
    yield failures


def _edge_families(stages: _Stages) -> Iterator[Metric]:
    for metric in EDGE_COUNTERS:
        family = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=["pipeline", "source", "stage"])
        for number, pipeline, stats in stages:
            for source, edge in stats.edges.items():
                family.add_metric([number, pipeline.name_of(source), stats.name], metric.value(edge))
        yield family


def _request_families(pipelines: _Pipelines) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        f"{PREFIX}requests",
        "Requests by how they ended, and the stage that failed them.",
        labels=["pipeline", "outcome", "stage"],
    )
    for number, pipeline in pipelines:
        for (outcome, stage), count in list(pipeline.outcomes.items()):
            requests.add_metric([number, outcome, stage], count)
    yield requests
    for metric in REQUEST_HISTOGRAMS:
        family = HistogramMetricFamily(PREFIX + metric.name, metric.help, labels=["pipeline"])
        for number, pipeline in pipelines:
            pipeline.histograms[metric.name].add_to(family, [number])
        yield family
