# SPDX-License-Identifier: Apache-2.0
"""All observers on pipelines of real processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.forked_programs import QuickForkServer
from tests.metrics.collector import Collector
from tests.metrics.reading import assert_nested, read_events, scrape, tracks
from tests.orchestrator.pipelines import TRIANGLE, fresh_stats, make_config, opened
from tests.orchestrator.test_failure import wait_until
from vllm_omni import OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.pipeline import make_observers

CONFIG = make_config(*TRIANGLE)
STAGES = ("stage 0: a", "stage 1: b", "stage 2: c")
SMALL = {
    "dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "enforce_eager": True,
    "log_stats": True,
}  # fmt: skip
SIX_TOKENS = [{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}]


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    """Receives the spans of the stages' processes."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def spans_here(monkeypatch) -> InMemorySpanExporter:
    """Receives the spans of this process, as if the program had set up OpenTelemetry itself."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_all_observers_of_a_pipeline(collector: Collector, spans_here: InMemorySpanExporter, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine_args = {"otlp_traces_endpoint": collector.url}
    args = OmniArgs(model="", log_stats=True, trace_file=str(path), engine_args=engine_args)
    # A new fork server: a cached one has the environment of another test, without the collector's.
    options = {"observers": make_observers(CONFIG, args), "otlp_traces_endpoint": collector.url}
    with opened(CONFIG, server=QuickForkServer(), **options) as caller:
        whole = [caller.submit(f"p{i}", fake_bytes=100_000, fake_seconds=0.005) for i in range(8)]
        text_only = caller.submit("text", modalities=("text",))
        failed = caller.submit("bad", fake_fail="b")
        caller.wait(10)
        slow = caller.submit("slow", fake_seconds=60)
        caller.orchestrator.abort([slow])
        caller.wait_one()
        wait_until(lambda: all(it.num_running == it.queue_depth == 0 for it in fresh_stats(caller.orchestrator)))
        found = scrape()
    check_figures(found)
    check_timeline(read_events(path), whole, text_only, failed, slow)
    check_spans(collector, spans_here, whole)
    assert scrape() == {}


def check_figures(found: dict[tuple[str, ...], float]) -> None:
    requests = {key[1:]: value for key, value in found.items() if key[0] == "requests_total"}
    assert requests == {
        ("completed", "0", ""): 9,
        ("StageExecutionError", "0", "b"): 1,
        ("RequestAbortedError", "0", ""): 1,
    }
    assert found["stage_completed_total", "0", "0", "c"] == 8
    assert found["stage_failures_total", "RuntimeError", "0", "0", "b"] == 1
    assert found["edge_payloads_total", "0", "0", "a", "c"] >= 8
    assert found["edge_windows_total", "0", "0", "b", "c"] == 8
    assert found["edge_bytes_total", "0", "0", "b", "c"] > 8 * 100_000
    assert found["edge_seconds_total", "0", "0", "b", "c"] > 0
    assert found["e2e_request_latency_seconds_count", "0"] == 9
    assert found["time_to_first_token_seconds_count", "0"] == 9
    assert found["num_requests_waiting", "0", "0", "c"] == found["num_requests_running", "0", "0", "c"] == 0


def check_timeline(events: list[dict], whole: list[str], text_only: str, failed: str, slow: str) -> None:
    by_track = tracks(events)
    ran: dict[str, list[str]] = {}
    for (group, _), slices in by_track.items():
        assert_nested(slices)
        for event in slices:
            if event["name"].startswith("request "):
                ran.setdefault(event["name"].removeprefix("request "), []).append(group)
    for request_id in whole:
        assert sorted(ran[request_id]) == ["requests", *STAGES]
    assert sorted(ran[text_only]) == ["requests", STAGES[0]]
    assert STAGES[1] not in ran[failed] and STAGES[2] not in ran[failed]
    outcomes = {
        event["args"]["request_id"]: event["args"]["outcome"] for event in events if event.get("cat") == "request"
    }
    assert outcomes[failed] == "StageExecutionError" and outcomes[slow] == "RequestAbortedError"
    for request_id in whole:
        (root,) = [e for e in events if e.get("cat") == "request" and e["args"]["request_id"] == request_id]
        for event in events:
            if event.get("cat") == "stage" and event["name"] == root["name"]:
                assert root["ts"] <= event["ts"] and event["ts"] + event["dur"] <= root["ts"] + root["dur"]


def check_spans(collector: Collector, spans_here: InMemorySpanExporter, whole: list[str]) -> None:
    roots = {span.attributes["gen_ai.request.id"]: span for span in spans_here.get_finished_spans()}
    for request_id in whole:
        context = roots[request_id].context
        spans = [span for span in collector.spans if span.attributes["gen_ai.request.id"] == request_id]
        assert sorted(span.name for span in spans) == ["stage a", "stage b", "stage c"]
        assert {span.trace_id for span in spans} == {f"{context.trace_id:032x}"}
        assert {span.parent_id for span in spans} == {f"{context.span_id:016x}"}
        assert len({span.process_id for span in spans}) == 3


def engine_metrics(model: Path) -> dict[str, float]:
    """vLLM's metrics of the engine of a text model, without those that have further labels."""
    labels = ("0", str(model), "0", "0", "text")  # engine, model_name, pipeline, replica, stage
    return {name: value for (name, *values), value in scrape("vllm:").items() if tuple(values) == labels}


def test_all_observers_of_a_vllm_stage(
    collector: Collector, spans_here: InMemorySpanExporter, tiny_qwen3: Path, tmp_path: Path
) -> None:
    files = {"trace_file": str(tmp_path / "trace.json"), "otlp_traces_endpoint": collector.url}
    with OmniLLM(str(tiny_qwen3), **SMALL, **files) as llm:
        llm.generate(["user hello"] * 3, SIX_TOKENS, use_tqdm=False)
        (stats,) = llm.stats()
        table = llm.stats_table()
        found = scrape()
        wait_until(lambda: engine_metrics(tiny_qwen3).get("generation_tokens_total") == 18)
        engine = engine_metrics(tiny_qwen3)
    assert engine["request_prompt_tokens_count"] == engine["e2e_request_latency_seconds_count"] == 3
    assert engine["num_requests_running"] == engine["kv_cache_usage_perc"] == 0
    assert (stats.num_completed, stats.queue_depth, stats.num_running, stats.kv_blocks_used) == (3, 0, 0, 0)
    assert stats.kv_blocks_total > 0 and stats.num_steps >= 6 and stats.num_scheduled >= 18
    assert stats.step_seconds > 0
    assert table.splitlines()[1].split()[0] == "text"
    assert found["request_time_per_output_token_seconds_count", "0"] == 3
    assert len(tracks(read_events(tmp_path / "trace.json"))["stage 0: text", "slot 1000"]) >= 3
    roots = {f"{span.context.span_id:016x}" for span in spans_here.get_finished_spans()}
    for name in ("stage text", "llm_request"):
        spans = [span for span in collector.spans if span.name == name]
        assert {span.parent_id for span in spans} == roots and len(spans) == 3
        assert all(span.attributes["gen_ai.usage.completion_tokens"] == 6 for span in spans)


@pytest.mark.slow
def test_the_engine_metrics_of_a_restarted_stage_begin_at_zero(tiny_qwen3: Path) -> None:
    def wait_for_tokens(count: int) -> None:
        wait_until(lambda: engine_metrics(tiny_qwen3).get("generation_tokens_total") == count)

    with OmniLLM(str(tiny_qwen3), **SMALL) as llm:
        llm.generate(["user hello"] * 3, SIX_TOKENS, use_tqdm=False)
        wait_for_tokens(18)
        (stage,) = llm._pipeline.orchestrator._supervisor.stages
        os.kill(stage.process.pid, signal.SIGKILL)
        wait_for_tokens(0)
        llm.generate("user hello", SIX_TOKENS, use_tqdm=False)
        wait_for_tokens(6)
    assert engine_metrics(tiny_qwen3) == {}
