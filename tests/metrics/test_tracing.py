# SPDX-License-Identifier: Apache-2.0
"""Spans as an exporter gets them, with a tracer provider that the program has installed itself."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.metrics.tracing import RequestTracer, StageTracer

ENDPOINT = "http://localhost:1"  # never contacted: the provider of these tests has no OTLP exporter


@pytest.fixture
def exporter(monkeypatch):
    provider = TracerProvider()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # OpenTelemetry allows a process to set it only once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def spans(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_and_its_stages_are_one_trace(exporter, summarize):
    requests, tracer = RequestTracer(ENDPOINT), StageTracer(ENDPOINT)
    headers = requests.request_started("7", ["text", "audio"])
    summary = summarize()
    for stage in summary.stages:
        tracer.request_ended("7", headers, stage)
    requests.request_ended(summary)
    found = spans(exporter)
    assert set(found) == {"omni_request", "stage thinker", "stage talker"}
    root = found["omni_request"]
    assert root.parent is None
    for name in ("stage thinker", "stage talker"):
        assert found[name].parent.span_id == root.context.span_id
        assert found[name].context.trace_id == root.context.trace_id
        assert found[name].attributes["gen_ai.request.id"] == "7"
    assert root.attributes["vllm_omni.outcome"] == "completed"
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 2.5
    thinker = found["stage thinker"]
    assert thinker.attributes["gen_ai.usage.completion_tokens"] == 5
    assert thinker.attributes["gen_ai.latency.time_in_queue"] == 1.0
    assert thinker.end_time - thinker.start_time == pytest.approx(6e9, abs=1e8)
    assert thinker.status.status_code is StatusCode.UNSET


def test_a_request_of_a_traced_caller_joins_its_trace(exporter, summarize):
    requests = RequestTracer(ENDPOINT)
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = requests.request_started("7", ["text"], {"traceparent": f"00-{trace_id}-{span_id}-01"})
    requests.request_ended(summarize())
    root = spans(exporter)["omni_request"]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (trace_id, span_id)
    assert headers["traceparent"] == f"00-{trace_id}-{root.context.span_id:016x}-01"


def test_a_failure_is_an_error_of_the_request_and_its_stage(exporter, summarize):
    requests, tracer = RequestTracer(ENDPOINT), StageTracer(ENDPOINT)
    headers = requests.request_started("7", ["audio"])
    tracer.request_ended("7", headers, StageMetrics(stage_id=3, name="talker"), "StageExecutionError")
    requests.request_ended(summarize(outcome="StageExecutionError", failed_stage="talker", stages=[]))
    for span in spans(exporter).values():
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "StageExecutionError")
    stage = spans(exporter)["stage talker"]
    assert stage.end_time >= stage.start_time


def test_requests_have_traces_of_their_own(exporter, summarize):
    requests = RequestTracer(ENDPOINT)
    first, second = requests.request_started("7", []), requests.request_started("8", [])
    requests.request_ended(summarize("8"))
    requests.request_ended(summarize("7"))
    assert first["traceparent"] != second["traceparent"]
    assert len({span.context.trace_id for span in exporter.get_finished_spans()}) == 2
