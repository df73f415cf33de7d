# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.metrics.reading import read_events, scrape
from tests.orchestrator.pipelines import TRIANGLE, error_of, make_config, opened, texts
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.pipeline import make_observers
from vllm_omni.errors import PipelineStartError
from vllm_omni.metrics.observer import CompositeObserver, PipelineObserver
from vllm_omni.metrics.stats import StageMetrics


def test_times_of_a_request(summarize):
    summary = summarize()
    assert summary.seconds == 10.0
    assert summary.ttft == 2.5
    assert summary.ttfa == 4.0
    assert summarize(first_image=1007.0).ttfi == 7.0
    assert summary.tpot == 1.0  # four tokens after the first one, in four seconds
    assert summary.real_time_factor == 0.5


def test_outputs_that_are_missing_have_no_times(summarize):
    summary = summarize(stages=[], first_text=None, first_audio=None, audio_seconds=0.0)
    assert (summary.ttft, summary.ttfa, summary.ttfi, summary.tpot, summary.real_time_factor) == (None,) * 5


@pytest.mark.parametrize(("num_tokens", "expected"), [(5, 1.0), (1, 5.0), (0, None)])
def test_time_per_token_without_streaming(summarize, num_tokens, expected):
    stage = StageMetrics(stage_id=0, name="thinker", started=1001.0, finished=1006.0, num_output_tokens=num_tokens)
    assert summarize(stages=[stage]).tpot == expected


def test_a_single_token_has_no_time_after_the_first(summarize):
    stage = StageMetrics(
        stage_id=0, name="thinker", started=1001.0, first_output=1002.0, finished=1002.0, num_output_tokens=1
    )
    assert summarize(stages=[stage]).tpot is None


def test_there_are_no_observers_by_default(config):
    assert make_observers(config, OmniArgs(model="")) == []
    assert CompositeObserver([]).request_started("7", ["text"]) == {}
    assert scrape() == {}


def test_every_configured_observer_gets_the_request(config, summarize, tmp_path: Path):
    args = OmniArgs(model="", log_stats=True, trace_file=str(tmp_path / "trace.json"))
    observer = CompositeObserver(make_observers(config, args))
    observer.request_started("7", ["text", "audio"])
    observer.request_ended(summarize())
    scraped = scrape()
    observer.close()
    assert scraped["requests_total", "completed", "0", ""] == 1
    assert any(event["name"] == "request 7" for event in read_events(tmp_path / "trace.json"))


def test_a_trace_file_that_cannot_be_written_registers_nothing(config, tmp_path: Path):
    args = OmniArgs(model="", log_stats=True, trace_file=str(tmp_path / "nowhere" / "trace.json"))
    with pytest.raises(PipelineStartError, match=r"nowhere/trace\.json: cannot be written \(No such file"):
        make_observers(config, args)
    assert scrape() == {}


def test_trace_headers_come_from_the_observer_that_makes_them():
    class Tracing(PipelineObserver):
        def request_started(self, request_id, modalities, trace_headers=None):
            return {"traceparent": request_id}

    observer = CompositeObserver([PipelineObserver(), Tracing(), PipelineObserver()])
    assert observer.request_started("7", []) == {"traceparent": "7"}


class Failing(PipelineObserver):
    """An exporter that always fails."""

    def request_started(self, request_id, modalities, trace_headers=None):
        raise ConnectionError("the collector is gone")

    def request_ended(self, summary):
        raise OSError("no space left on device")

    def stage_stats(self, stats):
        raise ValueError("a value is wrong")

    def close(self):
        raise RuntimeError("not open")


def test_an_exception_of_an_observer_is_logged_once_and_not_raised(caplog, summarize):
    calls = []

    class Counting(PipelineObserver):
        def request_started(self, request_id, modalities, trace_headers=None):
            calls.append("started")
            return {"traceparent": request_id}

        def request_ended(self, summary):
            calls.append("ended")

        def close(self):
            calls.append("closed")

    observer = CompositeObserver([Failing(), Counting()])
    with caplog.at_level("ERROR"):
        for _ in range(3):
            assert observer.request_started("7", []) == {"traceparent": "7"}
            observer.request_ended(summarize())
        observer.close()
    assert calls == ["started", "ended"] * 3 + ["closed"]
    messages = [record.getMessage().split()[0] for record in caplog.records]
    assert messages == ["Failing.request_started", "Failing.request_ended", "Failing.close"]
    assert all(record.exc_info for record in caplog.records)


def test_a_pipeline_runs_with_a_failing_observer():
    config = make_config(*TRIANGLE)
    with opened(config, observers=[Failing()]) as caller:
        good = [caller.submit(f"p{i}") for i in range(3)]
        bad = caller.submit("bad", fake_fail="b")
        ends = caller.wait(4)
        assert [texts(ends[request_id])[0] for request_id in good] == ["p0>a", "p1>a", "p2>a"]
        assert "b fails (fake_fail)" in str(error_of(ends[bad]))
        assert len(caller.orchestrator.stats()) == 3
