# SPDX-License-Identifier: Apache-2.0
"""Scrapes of vLLM's registry."""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.metrics.reading import scrape
from vllm_omni.metrics.prometheus import PrometheusObserver
from vllm_omni.metrics.stats import CacheCounts, EdgeStats, MetricFamily, SpeculationCounts, StageHealth, StageStats

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"


@pytest.fixture
def observer(config):
    observer = PrometheusObserver(config)
    yield observer
    observer.close()


def test_the_metrics_of_a_stage(observer):
    observer.stage_stats(
        StageStats(
            stage_id=3,
            name="talker",
            queue_depth=4,
            num_running=2,
            num_enqueued=9,
            num_dequeued=5,
            num_completed=3,
            num_aborted=1,
            failures={"StageExecutionError": 2},
            blocked_seconds=0.5,
            num_steps=10,
            step_seconds=1.5,
            num_scheduled=18,
            kv_blocks_used=7,
            kv_blocks_total=64,
            unbatched=["transformer", "vae"],
            resident_bytes=3 << 20,
            device_bytes=5 << 20,
            caches={"encoder": CacheCounts(queries=8, hits=5)},
            edges={0: EdgeStats(num_payloads=6, num_bytes=600, seconds=0.25, num_windows=3)},
        )
    )
    found = {key: value for key, value in scrape().items() if "talker" in key}
    assert found == {
        ("num_requests_waiting", "0", "0", "talker"): 4,
        ("num_requests_running", "0", "0", "talker"): 2,
        ("kv_blocks_used", "0", "0", "talker"): 7,
        ("kv_blocks", "0", "0", "talker"): 64,
        ("unbatched_networks", "0", "0", "talker"): 2,
        ("stage_resident_memory_bytes", "0", "0", "talker"): 3 << 20,
        ("stage_device_memory_bytes", "0", "0", "talker"): 5 << 20,
        ("cache_queries_total", "encoder", "0", "0", "talker"): 8,
        ("cache_hits_total", "encoder", "0", "0", "talker"): 5,
        ("stage_enqueued_total", "0", "0", "talker"): 9,
        ("stage_dequeued_total", "0", "0", "talker"): 5,
        ("stage_completed_total", "0", "0", "talker"): 3,
        ("stage_aborted_total", "0", "0", "talker"): 1,
        ("stage_failures_total", "StageExecutionError", "0", "0", "talker"): 2,
        ("stage_blocked_seconds_total", "0", "0", "talker"): 0.5,
        ("stage_steps_total", "0", "0", "talker"): 10,
        ("stage_step_seconds_total", "0", "0", "talker"): 1.5,
        ("stage_scheduled_total", "0", "0", "talker"): 18,
        ("edge_payloads_total", "0", "0", "thinker", "talker"): 6,
        ("edge_bytes_total", "0", "0", "thinker", "talker"): 600,
        ("edge_seconds_total", "0", "0", "thinker", "talker"): 0.25,
        ("edge_windows_total", "0", "0", "thinker", "talker"): 3,
    }


def test_the_state_of_each_replica_is_read_by_a_scrape(observer):
    assert not [key for key in scrape() if key[0].startswith("stage_state")]
    health = [StageHealth(0, "thinker", 0, "ready"), StageHealth(3, "talker.1", 1, "restarting", num_restarts=2)]
    observer.watch_health(lambda: health)
    found = {key: value for key, value in scrape().items() if key[0] in ("stage_state", "stage_restarts_total")}
    assert {key for key, value in found.items() if value == 1} == {
        ("stage_state", "0", "0", "thinker", "ready"),
        ("stage_state", "0", "1", "talker", "restarting"),
    }
    assert len(found) == 2 * 6 + 2 and found["stage_restarts_total", "0", "1", "talker"] == 2
    health[1] = StageHealth(3, "talker.1", 1, "dead", num_restarts=3)
    assert scrape()["stage_state", "0", "1", "talker", "dead"] == 1
    assert scrape()["stage_state", "0", "1", "talker", "restarting"] == 0


def test_the_callers_cache_of_media_is_read_by_a_scrape(observer):
    assert scrape()["mm_cache_queries_total", "0"] == 0
    counts = CacheCounts(queries=4, hits=3)
    observer.watch_media_cache(lambda: counts)
    counts += CacheCounts(queries=1)
    assert (scrape()["mm_cache_queries_total", "0"], scrape()["mm_cache_hits_total", "0"]) == (5, 3)


def test_the_speculative_answers_of_a_server_are_read_by_a_scrape(observer):
    assert scrape()["realtime_speculative_responses_started_total", "0"] == 0
    counts = SpeculationCounts(started=4, promoted=3)
    observer.watch_speculations(counts)
    counts.wasted_tokens += 17
    names = ("started", "promoted", "wasted_tokens")
    assert [scrape()[f"realtime_speculative_responses_{name}_total", "0"] for name in names] == [4, 3, 17]


def test_only_the_latest_snapshot_counts(observer):
    observer.stage_stats(StageStats(stage_id=0, name="thinker", num_steps=1))
    observer.stage_stats(StageStats(stage_id=0, name="thinker", num_steps=5))
    assert scrape()["stage_steps_total", "0", "0", "thinker"] == 5


GENERATION = "vllm:generation_"  # other metrics of vLLM belong to its server and count for the whole process


def tokens(value: float) -> list[MetricFamily]:
    samples = [("vllm:generation_tokens_total", {"model_name": "m", "engine": "0"}, value)]
    return [MetricFamily(name="vllm:generation_tokens", documentation="Tokens.", kind="counter", samples=samples)]


def test_metrics_of_engines_get_the_labels_of_their_stage(observer):
    observer.engine_metrics(0, 0, tokens(7))
    observer.engine_metrics(3, 1, tokens(9))
    assert scrape(GENERATION) == {
        ("tokens_total", "0", "m", "0", "0", "thinker"): 7,
        ("tokens_total", "0", "m", "0", "1", "talker"): 9,
    }


def test_the_metrics_of_a_restarted_engine_replace_those_before(observer):
    observer.engine_metrics(0, 0, tokens(7))
    observer.engine_metrics(0, 0, tokens(1))
    assert list(scrape(GENERATION).values()) == [1]


def test_a_completed_request_is_in_the_histograms(observer, summarize):
    observer.request_ended(summarize(first_image=1007.0))
    found = scrape()
    for name, value in (
        ("time_to_first_token_seconds", 2.5),
        ("time_to_first_audio_seconds", 4.0),
        ("time_to_first_image_seconds", 7.0),
        ("request_time_per_output_token_seconds", 1.0),
        ("e2e_request_latency_seconds", 10.0),
        ("real_time_factor", 0.5),
    ):
        assert (found[f"{name}_count", "0"], found[f"{name}_sum", "0"]) == (1, value)
    # A value on a bound belongs below it, as Prometheus defines `le`.
    assert found["time_to_first_token_seconds_bucket", "1.0", "0"] == 0
    assert found["time_to_first_token_seconds_bucket", "2.5", "0"] == 1
    assert found["time_to_first_token_seconds_bucket", "+Inf", "0"] == 1


def test_requests_are_counted_by_outcome(observer, summarize):
    observer.request_ended(summarize())
    observer.request_ended(summarize(outcome="RequestAbortedError"))
    observer.request_ended(summarize(outcome="StageDeadError", failed_stage="talker"))
    observer.request_ended(summarize(outcome="StageDeadError", failed_stage="talker"))
    found = scrape()
    assert {key: value for key, value in found.items() if key[0] == "requests_total"} == {
        ("requests_total", "completed", "0", ""): 1,
        ("requests_total", "RequestAbortedError", "0", ""): 1,
        ("requests_total", "StageDeadError", "0", "talker"): 2,
    }
    assert found["e2e_request_latency_seconds_count", "0"] == 1  # completed requests only


def test_two_pipelines_in_one_process(observer, config, summarize):
    second = PrometheusObserver(config)
    observer.stage_stats(StageStats(stage_id=0, name="thinker", num_steps=1))
    second.stage_stats(StageStats(stage_id=0, name="thinker", num_steps=2))
    second.request_ended(summarize())
    found = scrape()
    assert (found["stage_steps_total", "0", "0", "thinker"], found["stage_steps_total", "1", "0", "thinker"]) == (1, 2)
    assert found["e2e_request_latency_seconds_count", "1"] == 1
    second.close()
    assert not [key for key in scrape() if "1" in key[1:2]]
    assert scrape()["stage_steps_total", "0", "0", "thinker"] == 1


def test_a_closed_pipeline_is_removed_from_the_registry(config):
    first, second = PrometheusObserver(config), PrometheusObserver(config)
    first.close()
    first.close()
    assert scrape()
    second.close()
    assert b"vllm_omni:" not in generate_latest(REGISTRY)
    PrometheusObserver(config).close()


def test_vllm_does_not_unregister_the_collector(observer):
    observer.stage_stats(StageStats(stage_id=0, name="thinker"))
    unregister_vllm_metrics()  # vLLM does this whenever it makes a logger of its own
    assert scrape()["stage_steps_total", "0", "0", "thinker"] == 0


def test_every_metric_is_documented(observer):
    text = DOCUMENT.read_text()
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    for family in families:
        if family.name.startswith("vllm_omni:"):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"`{name.removeprefix('vllm_omni:')}` | {family.type}" in text, name
