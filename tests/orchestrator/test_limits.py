# SPDX-License-Identifier: Apache-2.0
"""Deadlines, admission, watermarks: requests wait or are refused, and nothing is lost."""

import itertools
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.orchestrator.pipelines import (
    FAR,
    Caller,
    error_of,
    fake_stage,
    fresh_stats,
    make_config,
    opened,
    state_of,
    texts,
)
from tests.orchestrator.test_failure import wait_until
from vllm_omni.errors import PipelineClosedError, PipelineFullError, RequestAbortedError, RequestTimeoutError
from vllm_omni.events import CompletedEvent

STAGES = (fake_stage(0, "quick"), fake_stage(1, "slow", (0,), "text"))


def running(*stages: dict, **runtime: Any) -> AbstractContextManager[Caller]:
    return opened(make_config(*stages, **runtime))


def test_a_deadline_ends_a_request_in_any_state() -> None:
    with running(*STAGES, max_inflight=2) as caller:
        working = caller.submit("working", timeout_s=0.2, fake_seconds=FAR, fake_only="slow")
        queued = caller.submit("queued in a stage", timeout_s=0.2, fake_seconds=FAR, fake_only="slow")
        waiting = caller.submit("waiting for admission", timeout_s=0.2)
        free = caller.submit("no deadline")
        ends = caller.wait(4)
        for request_id in (working, queued, waiting):
            error = error_of(ends[request_id])
            assert isinstance(error, RequestTimeoutError) and error.request_id == request_id
        assert texts(ends[free]) == ["no deadline>quick>slow"]
        caller.submit("in time", timeout_s=60)
        assert texts(caller.wait_one()) == ["in time>quick>slow"]


def test_a_clock_that_jumps_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 30 years, back and forth: the system's time is set while requests run."""
    now, jumps = time.time, itertools.cycle((0.0, 1e9, -1e9))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    with running(*STAGES) as caller:
        assert len({time.time() // 1e8 for _ in range(3)}) == 3
        for _ in range(3):
            caller.submit("in time", timeout_s=60, streams=True, fake_tokens=3)
            events = caller.events_of(f"r{caller.count}")
            assert isinstance(events[-1], CompletedEvent) and len(events) > 1
        caller.submit("late", timeout_s=0.2, fake_seconds=FAR, fake_only="slow")
        assert isinstance(error_of(caller.wait_one()), RequestTimeoutError)
        assert set(state_of(caller.orchestrator).values()) == {"ready"}


def test_an_abort_reaches_a_request_that_waits_for_admission() -> None:
    with running(*STAGES, max_inflight=1) as caller:
        first = caller.submit("first", fake_seconds=FAR, fake_only="slow")
        second = caller.submit("second")
        third = caller.submit("third")
        for request_id in (second, first):
            caller.orchestrator.abort([request_id])
            assert isinstance(error_of(caller.wait(1)[request_id]), RequestAbortedError)
        assert texts(caller.wait(1)[third]) == ["third>quick>slow"]


def test_a_full_pipeline_refuses_or_blocks() -> None:
    with running(*STAGES, max_inflight=2, max_queued=1) as caller:
        first = caller.submit("first", fake_seconds=FAR, fake_only="slow")
        for i in range(2):
            caller.submit(f"p{i}")
        with pytest.raises(PipelineFullError, match=r"3 requests.*max_queued") as full:
            caller.submit("refused", wait=False)
        assert full.value.retry_after_s >= 1 and full.value.recoverable
        submitting = threading.Thread(target=caller.submit, args=("patient",))
        submitting.start()
        caller.orchestrator.abort([first])
        ends = caller.wait(4)
        submitting.join()
        assert isinstance(error_of(ends.pop(first)), RequestAbortedError)
        assert all(isinstance(end, CompletedEvent) for end in ends.values())
        caller.submit("room again", wait=False)
        caller.wait_one()


def test_a_request_would_wait_where_others_wait_in_a_stage_or_all_are_paused() -> None:
    with running(*STAGES, max_inflight=6) as caller:
        orchestrator = caller.orchestrator
        assert not orchestrator.would_wait()
        caller.submit("a", fake_seconds=FAR, fake_only="slow")
        wait_until(lambda: fresh_stats(orchestrator)[1].num_running == 1)
        assert not orchestrator.would_wait() and orchestrator.would_wait(5)
        others = [caller.submit(name) for name in "bc"]
        wait_until(lambda: fresh_stats(orchestrator)[1].queue_depth == 1)  # b is in the engine
        assert orchestrator.would_wait()
        orchestrator.abort(others)
        caller.wait(2)
        wait_until(lambda: fresh_stats(orchestrator)[1].queue_depth == 0)
        assert not orchestrator.would_wait()
        orchestrator.pause()
        wait_until(orchestrator.would_wait)


def test_closing_wakes_callers_that_wait_for_room() -> None:
    errors: list[Exception] = []
    with running(*STAGES, max_inflight=1, max_queued=0) as caller:
        caller.submit("first", fake_seconds=FAR, fake_only="slow")

        def submit() -> None:
            try:
                caller.submit("second")
            except PipelineClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=submit)
        thread.start()
    thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize(
    "limits", [{"max_queued": 3}, {"max_queued": 1000, "high_watermark_bytes": 600_000}], ids=["requests", "bytes"]
)
def test_a_slow_stage_stops_its_feeders_and_nothing_is_lost(limits: dict[str, int]) -> None:
    """The fast stage could finish all of them immediately; it must not run ahead of the slow one."""
    with running(*STAGES, defaults=limits) as caller:
        for i in range(30):
            caller.submit(f"p{i}", fake_bytes=300_000, fake_seconds={"slow": 0.02})
        deepest = 0
        for _ in range(30):
            caller.next()
            quick, slow = caller.orchestrator.stats()
            deepest = max(deepest, slow.queue_depth)
        # The size of an output is known when it is made: two more requests were started before.
        assert deepest <= (3 if limits["max_queued"] == 3 else 2 + 2)
        assert slow.num_completed == 30
        assert quick.blocked_seconds > 0


def test_a_request_with_priority_passes_those_that_wait_in_the_second_stage() -> None:
    with running(*STAGES) as caller:
        a = caller.submit("a", fake_seconds=FAR, fake_only="slow")
        wait_until(lambda: fresh_stats(caller.orchestrator)[1].num_running == 1)
        b, c, d, e = [caller.submit(name, priority=int(name == "c")) for name in "bcde"]
        wait_until(lambda: fresh_stats(caller.orchestrator)[1].queue_depth == 3)  # b is in the engine
        f = caller.submit("f", priority=-1)
        wait_until(lambda: fresh_stats(caller.orchestrator)[1].queue_depth == 4)
        caller.orchestrator.abort([a])
        assert list(caller.wait(6)) == [a, f, b, d, e, c], "also the one that waits in the engine"


def test_a_request_with_priority_is_admitted_first() -> None:
    with running(*STAGES, max_inflight=1) as caller:
        first = caller.submit("first", fake_seconds=FAR, fake_only="slow")
        wait_until(lambda: fresh_stats(caller.orchestrator)[1].num_running == 1)
        second, third = caller.submit("second"), caller.submit("third", priority=-1)
        caller.orchestrator.abort([first])
        assert list(caller.wait(3)) == [first, third, second]


def test_back_pressure_reaches_admission() -> None:
    """While the last stage is busy, no more requests are in the pipeline than its queues hold."""
    stages = (*STAGES, fake_stage(2, "slowest", (1,), "audio"))
    with running(*stages, defaults={"max_queued": 2}) as caller:
        for i in range(30):
            caller.submit(f"p{i}", fake_seconds=0.03, fake_only="slowest")
        for _ in range(20):
            caller.next()
            entered = caller.orchestrator.stats()[0].num_enqueued
            left = fresh_stats(caller.orchestrator)[2].num_completed
            assert entered - left <= 3 * (2 + 2), "in each stage two wait and two are in the engine"
        caller.wait(10)


def test_requests_without_the_slow_stage_overtake_those_with_it() -> None:
    stages = (fake_stage(0, "first", (), "text"), fake_stage(1, "slow", (0,), "audio"))
    with running(*stages, defaults={"max_queued": 1}) as caller:
        stuck = [caller.submit(f"p{i}", fake_seconds=FAR, fake_only="slow") for i in range(3)]
        text = caller.submit("text", ("text",))
        assert caller.wait_one().request_id == text
        caller.orchestrator.abort(stuck)
        caller.wait(3)
