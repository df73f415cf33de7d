# SPDX-License-Identifier: Apache-2.0
"""`ReplicaSet`: which replica gets a request."""

from collections import Counter
from typing import Any

import pytest

from tests.orchestrator.pipelines import fake_stage, make_config
from vllm_omni.inputs import StageRequest
from vllm_omni.launch.fake import FakeStage
from vllm_omni.metrics.stats import StageState
from vllm_omni.orchestrator.replica_set import ReplicaSet

SYSTEM_PROMPT = list(range(100))


class Replicas:
    """Three replicas of stage a, without processes."""

    def __init__(self, routing: str) -> None:
        config = make_config(fake_stage(0, "a", (), "text", replicas=3, routing=routing))
        self.log: list[tuple[str, Any]] = []
        self.stages = [FakeStage(replica, self.log) for replica in config.instances.values()]
        self._set = ReplicaSet(self.stages, config.stages[0].runtime.routing)

    @property
    def take_new_requests(self) -> bool:
        return self._set.take_new_requests()

    def select(self, *token_ids: int) -> str:
        """Selects a replica as the router does; returns its name."""
        stage = self._set.select(StageRequest(request_id="r", prompt_token_ids=list(token_ids)))
        stage.num_requests += 1
        return stage.instance.name


def test_the_least_loaded_replica_gets_a_request() -> None:
    replicas = Replicas("least_loaded")
    assert [replicas.select() for _ in range(4)] == ["a.0", "a.1", "a.2", "a.0"]
    replicas.stages[2].num_requests = 0
    assert replicas.select() == "a.2"


def test_round_robin_does_not_look_at_the_load() -> None:
    replicas = Replicas("round_robin")
    replicas.stages[1].num_requests = 5
    assert [replicas.select() for _ in range(6)] == ["a.0", "a.1", "a.2"] * 2


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "prefix"])
def test_a_replica_without_a_process_or_room_gets_nothing_while_another_has_both(routing: str) -> None:
    replicas = Replicas(routing)
    replicas.stages[0].state = StageState.RESTARTING
    replicas.stages[1].credit.spend(100, 0)
    assert {replicas.select(*SYSTEM_PROMPT) for _ in range(3)} == {"a.2"}
    replicas.stages[2].state = StageState.DEAD
    assert replicas.select() == "a.1", "it has a process, and will have room"
    replicas.stages[1].state = StageState.DEAD
    assert replicas.select() == "a.0", "it will have a process"


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "prefix"])
def test_a_replica_that_does_not_answer_gets_nothing_while_another_does(routing: str) -> None:
    replicas = Replicas(routing)
    replicas.stages[0].state = replicas.stages[2].state = StageState.UNRESPONSIVE
    assert {replicas.select(*SYSTEM_PROMPT) for _ in range(3)} == {"a.1"}
    for stage in replicas.stages:
        stage.state = StageState.UNRESPONSIVE
    assert replicas.select() in {"a.0", "a.1", "a.2"}, "it waits for one of them"


def test_requests_are_admitted_while_one_replica_has_room() -> None:
    replicas = Replicas("least_loaded")
    for stage in replicas.stages:
        assert replicas.take_new_requests
        stage.credit.spend(100, 0)
    assert not replicas.take_new_requests


def test_prompts_with_the_same_beginning_go_to_one_replica() -> None:
    replicas = Replicas("prefix")
    first = replicas.select(*SYSTEM_PROMPT, 1, 2, 3)
    assert [replicas.select(*SYSTEM_PROMPT, 1000 + i) for i in range(5)] == [first] * 5
    others = [replicas.select(*range(1000 * i, 1000 * i + 100)) for i in range(1, 5)]
    assert first not in others, "other prompts go to the least loaded"
    short = [replicas.select(1, 2, 3) for _ in range(2)]
    assert first not in short, "so do those that are too short to be worth it"


def test_the_longest_common_beginning_counts() -> None:
    replicas = Replicas("prefix")
    one = replicas.select(*SYSTEM_PROMPT)
    for stage in replicas.stages:
        stage.num_requests = 0 if stage.instance.name != one else 100
    other = replicas.select(*SYSTEM_PROMPT, *range(5000, 5100))
    for stage in replicas.stages:
        stage.num_requests = 0
    assert other != one
    assert replicas.select(*SYSTEM_PROMPT, *range(5000, 5100), 7) == other


def test_an_overloaded_replica_does_not_get_all_prompts_with_its_beginning() -> None:
    replicas = Replicas("prefix")
    counts = Counter(replicas.select(*SYSTEM_PROMPT, i) for i in range(60))
    assert sorted(counts) == ["a.0", "a.1", "a.2"] and max(counts.values()) < 40
