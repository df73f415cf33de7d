# SPDX-License-Identifier: Apache-2.0
"""vLLM's Prometheus metrics of one engine, as they leave its process."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from vllm_omni.metrics.stats import MetricFamily


class EngineMetrics(PrometheusStatLogger):
    """Keeps the metrics in a registry of its own. In that of the process, the metrics of a second engine would replace
    those of the first one."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._own_registry = CollectorRegistry()
        kinds = {"_gauge_cls": Gauge, "_counter_cls": Counter, "_histogram_cls": Histogram}
        factories: dict[str, Any] = {name: partial(kind, registry=self._own_registry) for name, kind in kinds.items()}
        # Since Python 3.14 a partial in a class is a method.
        in_class = {name: staticmethod(factory) for name, factory in factories.items()}
        for part in ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls"):
            base = getattr(PrometheusStatLogger, part)
            factories[part] = type(base.__name__, (base,), in_class)
        vars(self).update(factories)
        super().__init__(vllm_config, engine_indexes)

    def families(self) -> list[MetricFamily]:
        """The current values. May be called from any thread."""
        return [
            MetricFamily(
                name=family.name,
                documentation=family.documentation,
                kind=family.type,
                samples=[(s.name, s.labels, s.value) for s in family.samples if not s.name.endswith("_created")],
            )
            for family in self._own_registry.collect()
        ]
