# SPDX-License-Identifier: Apache-2.0
"""Stages with several replicas: each request runs in one of them, and one that dies fails only its own."""

import threading
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
from tests.orchestrator.test_failure import kill, restarts_of, wait_until
from vllm_omni.errors import RequestAbortedError
from vllm_omni.events import CompletedEvent

WINDOW = {"from": 0, "to": 1, "window_size": 3, "unit": "rows"}
STAGES = (
    fake_stage(0, "a", (), "text", replicas=2),
    fake_stage(1, "b", (0,), "text", replicas=3),
    fake_stage(2, "c", (0, 1), "text", replicas=2, routing="round_robin"),
)


def running(*stages: dict, **runtime: Any) -> AbstractContextManager[Caller]:
    return opened(make_config(*(stages or STAGES), restart={"backoff_s": 0.0}, **runtime))


@pytest.mark.parametrize("edges", [[], [WINDOW]])
def test_requests_spread_over_the_replicas_and_their_outputs_stay_together(edges: list[dict]) -> None:
    with running(edges=edges) as caller:
        are_submitted = threading.Event()
        caller.orchestrator._command(are_submitted.wait)  # They are admitted together, however slowly they come.
        ids = [caller.submit(f"p{i}", fake_tokens=7) for i in range(24)]
        caller.submit("alone", fake_tokens=7)
        are_submitted.set()
        ends = caller.wait(len(ids) + 1)
        expected = [output.outputs[0].token_ids for output in ends.popitem()[1].outputs]  # type: ignore[union-attr]
        for end in ends.values():
            assert isinstance(end, CompletedEvent)
            assert [output.outputs[0].token_ids for output in end.outputs] == expected
        counts = {stats.name: stats.num_completed for stats in fresh_stats(caller.orchestrator)}
        assert sum(counts[f"a.{i}"] for i in range(2)) == sum(counts[f"b.{i}"] for i in range(3)) == 25
        assert all(count >= 4 for count in counts.values()), counts


def test_health_and_statistics_name_each_replica() -> None:
    with running() as caller:
        names = ["a.0", "a.1", "b.0", "b.1", "b.2", "c.0", "c.1"]
        assert state_of(caller.orchestrator) == dict.fromkeys(names, "ready")
        assert [(s.stage_id, s.replica, s.name) for s in fresh_stats(caller.orchestrator)] == [
            (0, 0, "a.0"), (0, 1, "a.1"), (1, 0, "b.0"), (1, 1, "b.1"), (1, 2, "b.2"), (2, 0, "c.0"), (2, 1, "c.1"),
        ]  # fmt: skip
        assert set(caller.orchestrator.activity()) == {"a", "b", "c"}


def num_running_in_b(caller: Caller) -> list[int]:
    return [stats.num_running for stats in fresh_stats(caller.orchestrator) if stats.stage_id == 1]


def test_a_replica_that_dies_tries_its_own_requests_again_and_the_others_take_new_ones() -> None:
    with running() as caller:
        held_ids = [caller.submit(f"held {i}", fake_seconds={"b": FAR}) for i in range(3)]
        wait_until(lambda: num_running_in_b(caller) == [1, 1, 1])
        ids = [caller.submit(f"behind {i}") for i in range(3)]
        wait_until(lambda: num_running_in_b(caller) == [2, 2, 2])
        kill(caller, "b.1")
        wait_until(lambda: restarts_of(caller, "b.1") == 1)
        new_ids = [caller.submit(f"new {i}") for i in range(4)]
        caller.orchestrator.abort(held_ids)
        ends = caller.wait(len(held_ids) + len(ids) + len(new_ids))
        assert {type(error_of(ends[request_id])) for request_id in held_ids} == {RequestAbortedError}
        assert all(isinstance(ends[request_id], CompletedEvent) for request_id in ids), "one was tried again"
        for number, request_id in enumerate(new_ids):
            assert texts(ends[request_id])[0] == f"new {number}>a"
        wait_until(lambda: set(state_of(caller.orchestrator).values()) == {"ready"})
        again = [caller.submit(f"again {i}") for i in range(6)]
        assert all(isinstance(end, CompletedEvent) for end in caller.wait(len(again)).values())
        restarts = {stage.name: stage.num_restarts for stage in caller.orchestrator.health()}
        assert restarts.pop("b.1") == 1 and not any(restarts.values())
