# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests and stages, where `otlp_traces_endpoint` is set.

The caller's process makes a root span for each request and passes its context to the stages. Each stage makes a child
span, and so does vLLM's engine, which gets the same context. A span is made when its request ends, with the times
recorded until then.

A process has one tracer provider: vLLM's (`vllm.tracing.init_tracer`), or one that the program has installed itself,
which then decides where spans go.
"""

import threading
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from vllm.tracing import SpanAttributes, extract_trace_context, init_tracer

from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import COMPLETED, StageMetrics

_FLUSH_TIMEOUT_S = 2.0


class RequestTracer(PipelineObserver):
    """Makes the root span of each request, `omni_request`: from its admission to its end."""

    def __init__(self, otlp_traces_endpoint: str) -> None:
        self._tracer = _open_tracer("vllm_omni.orchestrator", otlp_traces_endpoint)
        self._running: dict[str, tuple[Span, float]] = {}

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        span = self._tracer.start_span(
            "omni_request",
            context=extract_trace_context(trace_headers),
            kind=SpanKind.SERVER,
            attributes={SpanAttributes.GEN_AI_REQUEST_ID: request_id, "vllm_omni.modalities": modalities},
        )
        self._running[request_id] = span, time.monotonic()
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(span))
        return headers

    def request_ended(self, summary: RequestSummary) -> None:
        span, admitted = self._running.pop(summary.request_id)
        values = {
            SpanAttributes.GEN_AI_LATENCY_E2E: summary.seconds,
            SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: summary.ttft,
            SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: summary.num_text_tokens,
            "vllm_omni.seconds_until_admitted": admitted - summary.arrival,
            "vllm_omni.time_to_first_audio": summary.ttfa,
            "vllm_omni.audio_seconds": summary.audio_seconds,
            "vllm_omni.time_to_first_image": summary.ttfi,
            "vllm_omni.num_images": summary.num_images,
            "vllm_omni.failed_stage": summary.failed_stage,
        }
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        _end(span, summary.outcome, _epoch_ns(summary.ended))

    def close(self) -> None:
        _flush()


class StageTracer:
    """Makes the spans of one stage, `stage NAME`, below the root spans of its requests. Runs in the stage's process."""

    def __init__(self, otlp_traces_endpoint: str) -> None:
        self._endpoint = otlp_traces_endpoint

    @cached_property
    def _tracer(self) -> Tracer:
        # Made on first use: by then vLLM's engine, if the stage has one, has set up the provider of this process.
        return _open_tracer("vllm_omni.stage", self._endpoint)

    def request_ended(
        self, request_id: str, trace_headers: Mapping[str, str], metrics: StageMetrics, outcome: str = COMPLETED
    ) -> None:
        """Makes the span of a request that ended in this stage.

        Args:
            trace_headers: The request's `StageRequest.trace_headers`.
            metrics: What the stage did; a request that did not complete may lack the start or the end.
            outcome: `completed`, `aborted`, or the name of an error class.
        """
        finished = metrics.finished or time.monotonic()
        arrival = metrics.arrival or finished
        start_time = _epoch_ns(arrival)
        attributes: dict[str, Any] = {
            SpanAttributes.GEN_AI_REQUEST_ID: request_id,
            SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: metrics.num_input_tokens,
            SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: metrics.num_output_tokens,
            "vllm_omni.stage_id": metrics.stage_id,
            "vllm_omni.stage": metrics.name,
            "vllm_omni.replica": metrics.replica,
            "vllm_omni.num_chunks": metrics.num_chunks,
        }
        if metrics.started:
            attributes[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = metrics.started - metrics.arrival
        span = self._tracer.start_span(
            f"stage {metrics.name}",
            context=extract_trace_context(trace_headers),
            kind=SpanKind.INTERNAL,
            start_time=start_time,
            attributes=attributes,
        )
        _end(span, outcome, start_time + int((finished - arrival) * 1e9))

    def close(self) -> None:
        """Sends the remaining spans; waits two seconds at most."""
        _flush()


def _open_tracer(name: str, endpoint: str) -> Tracer:
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        init_tracer(name, endpoint)
    return trace.get_tracer(name)


def _end(span: Span, outcome: str, end_time: int) -> None:
    span.set_attribute("vllm_omni.outcome", outcome)
    if outcome != COMPLETED:
        span.set_status(Status(StatusCode.ERROR, outcome))
    span.end(end_time)


def _epoch_ns(monotonic: float) -> int:
    """`time.monotonic()` seconds as nanoseconds of the wall clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _flush() -> None:
    """Sends the spans that are queued. A collector that does not answer must not delay the end of the process."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        thread = threading.Thread(target=provider.force_flush, name="omni-flush-spans", daemon=True)
        thread.start()
        thread.join(_FLUSH_TIMEOUT_S)
