# SPDX-License-Identifier: Apache-2.0
"""Verbs for stages, one after the other, with an answer of each replica; and a pause of a running pipeline."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.clock import Clock
from tests.orchestrator.pipelines import FAR, TIMEOUT_S, error_of, fake_stage, make_config, texts
from tests.orchestrator.test_failure import wait_until
from tests.orchestrator.test_limits import STAGES, running
from vllm_omni.control import AnyVerb, CollectiveRPC, CommitWeights, Freeze, ResetMMCache, Sleep, Thaw, WakeUp
from vllm_omni.distributed.messages import AbortMessage, ControlMessage, ControlResult
from vllm_omni.errors import ControlError, InvalidControlError, PipelineClosedError, RequestAbortedError
from vllm_omni.launch.fake import FakeStage
from vllm_omni.launch.spec_factory import StageWeights
from vllm_omni.metrics.stats import StageState
from vllm_omni.orchestrator import control_calls as module
from vllm_omni.orchestrator.control_calls import ControlCalls

CALL = CollectiveRPC(method="count")


class Stages:
    """Calls of stage a with two replicas and stage b, which are fakes."""

    def __init__(self) -> None:
        config = make_config(fake_stage(0, "a", replicas=2), fake_stage(1, "b", (0,), "text"))
        self.log: list[tuple[str, Any]] = []
        self.stages = {i: FakeStage(replica, self.log) for i, replica in config.instances.items()}
        self.first, self.b, self.second = (self.stages[i] for i in sorted(self.stages))
        self.calls = ControlCalls(self.stages)

    def ask(self, verb: AnyVerb, *stage_ids: int, timeout: float = FAR) -> Future[list[Any]]:
        result: Future[list[Any]] = Future()
        self.calls.call(verb, stage_ids, timeout, result)
        return result

    def take(self) -> list[tuple[str, AnyVerb]]:
        """What was sent since the last call."""
        sent = [(name, message.verb) for name, message in self.log if isinstance(message, ControlMessage)]
        self.log.clear()
        return sent

    def answer(self, stage: FakeStage, **result: Any) -> None:
        """The answer of a stage to the verb that runs."""
        message = ControlResult(instance_id=stage.instance_id, number=self.calls._number, **result)
        self.calls.on_result(stage, message)


@pytest.fixture
def stages() -> Stages:
    return Stages()


def test_all_replicas_answer_in_their_order(stages: Stages) -> None:
    result = stages.ask(CALL, 0)
    assert stages.take() == [("a.0", CALL), ("a.1", CALL)]
    stages.answer(stages.second, value=["second"])
    assert not result.done()
    stages.answer(stages.first, value=["first"])
    assert result.result(0) == [["first"], ["second"]]


def test_verbs_are_done_one_after_the_other(stages: Stages) -> None:
    first, second = stages.ask(CALL, 1), stages.ask(ResetMMCache(), 1)
    assert stages.take() == [("b", CALL)]
    stages.answer(stages.b)
    assert first.done() and stages.take() == [("b", ResetMMCache())]
    stages.answer(stages.b)
    assert second.done()


@pytest.mark.parametrize(("is_invalid", "kind"), [(True, InvalidControlError), (False, ControlError)])
def test_a_stage_that_cannot_is_named_and_the_next_verb_begins(
    stages: Stages, is_invalid: bool, kind: type[ControlError]
) -> None:
    first, second = stages.ask(CALL, 0), stages.ask(CALL, 1)
    stages.answer(stages.first, error="no method count", invalid=is_invalid)
    assert not first.done()  # The other replica has not answered.
    stages.answer(stages.second)
    with pytest.raises(kind, match=r"CollectiveRPC: stage 0 \(a\.0\): no method count") as raised:
        first.result(0)
    assert type(raised.value) is kind
    stages.answer(stages.b, value=2)
    assert second.result(0) == [2]


def test_a_stage_that_dies_fails_the_verb_that_it_was_told(stages: Stages) -> None:
    first, second = stages.ask(CALL, 0), stages.ask(CALL, 1)
    late = ControlResult(instance_id=stages.second.instance_id, number=stages.calls._number)
    stages.first.on_death("killed")
    stages.calls.on_stage_down(stages.first)
    with pytest.raises(ControlError, match=r"stage 0 \(a\.0\) died before it had done it: killed"):
        first.result(0)
    stages.calls.on_result(stages.second, late)
    assert not second.done()
    stages.answer(stages.b)
    assert second.done()


def test_a_stage_that_restarts_is_named_and_nothing_is_sent(stages: Stages) -> None:
    stages.second.on_death("killed")
    result = stages.ask(CALL, 0)
    with pytest.raises(ControlError, match=r"stage 0 \(a\.1\) is restarting: nothing was done"):
        result.result(0)
    assert stages.take() == []


def test_a_deadline_counts_from_the_begin(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    first, second = stages.ask(CALL, 0, timeout=5), stages.ask(CALL, 1, timeout=5)
    stages.answer(stages.first)
    clock.now += 5
    assert stages.calls.due == clock.now
    stages.calls.on_timer(clock.now)
    with pytest.raises(ControlError, match=r"stage 0 \(a\.1\) did not answer in time"):
        first.result(0)
    stages.calls.on_timer(clock.now)
    assert not second.done() and stages.calls.due == clock.now + 5


def test_a_replica_that_starts_is_frozen_as_the_others_are(stages: Stages) -> None:
    stages.second.on_death("killed")
    result = stages.ask(Freeze(), 0, 1)
    assert stages.take() == [("a.0", Freeze()), ("b", Freeze())]
    for stage in (stages.first, stages.b):
        stages.answer(stage)
    assert result.result(0) == [None, None]

    stages.second.state = StageState.READY
    stages.calls.on_stage_up(stages.second)
    assert stages.take() == [("a.1", Freeze())]
    stages.ask(Thaw(), 0, 1)
    stages.take()
    stages.calls.on_stage_up(stages.second)
    assert stages.take() == []


def test_a_replica_that_starts_is_asleep_as_the_others_are(stages: Stages) -> None:
    """One that is down cannot be asleep. One that is down when the others wake up comes up awake."""
    stages.second.on_death("killed")
    with pytest.raises(ControlError, match=r"stage 0 \(a\.1\) is restarting: nothing was done"):
        stages.ask(Sleep(level=2), 0).result(0)
    stages.second.state = StageState.READY
    stages.ask(Sleep(level=2), 0)
    stages.first.on_death("killed")
    stages.calls.on_stage_down(stages.first)
    stages.first.state = StageState.READY
    stages.take()
    stages.calls.on_stage_up(stages.first)
    stages.calls.on_stage_up(stages.b)
    assert stages.take() == [("a.0", Sleep(level=2))]

    stages.second.on_death("killed")
    result = stages.ask(WakeUp(), 0)
    assert stages.take() == [("a.0", WakeUp())]
    stages.answer(stages.first, value=True)
    assert result.result(0) == [True]
    stages.second.state = StageState.READY
    stages.calls.on_stage_up(stages.second)
    assert stages.take() == []


def test_a_stage_that_dies_of_a_commit_gets_the_weights_in_its_next_process(stages: Stages) -> None:
    """The others have them already, although the verb has failed."""
    seen: list[tuple[str, bool]] = []
    weights: dict[int, StageWeights] = {}
    stages.calls = ControlCalls(
        stages.stages, weights, lambda stage: seen.append((stage.label, stages.calls.has_weights(stage)))
    )
    result = stages.ask(CommitWeights(weights_path="/new", weight_version="2"), 0)
    number = stages.calls._number
    stages.first.on_death("killed")
    stages.calls.on_stage_down(stages.first)
    with pytest.raises(ControlError, match=r"CommitWeights: stage 0 \(a\.0\) died before it had done it"):
        result.result(0)
    assert weights == {0: StageWeights("2", "/new")} and not stages.calls.has_weights(stages.first)
    late = ControlResult(instance_id=stages.second.instance_id, number=number, weight_version="2")
    stages.calls.on_result(stages.second, late)
    assert seen == [("stage 0 (a.1)", True)]


def test_a_stage_without_the_weights_is_asked_to_update_them(stages: Stages) -> None:
    stages.first.state = StageState.OUTDATED
    stages.ask(CommitWeights(weights_path="/new", weight_version="2"), 0)
    assert [name for name, _ in stages.take()] == ["a.0", "a.1"]
    stages.first.send(AbortMessage(request_ids=["r"]))
    assert stages.log == []


def test_the_end_of_the_pipeline_ends_all_calls(stages: Stages) -> None:
    calls = [stages.ask(CALL, 0), stages.ask(CALL, 1)]
    stages.calls.close("closed")
    for call in calls:
        with pytest.raises(PipelineClosedError, match="closed"):
            call.result(0)


class TestPause:
    def test_requests_that_run_are_completed_and_others_wait(self) -> None:
        with running(*STAGES) as caller:
            runs = caller.submit("runs", fake_seconds=0.3, fake_only="slow")
            wait_until(lambda: sum(caller.orchestrator.activity().values()) > 0)
            drained = caller.orchestrator.pause()
            waits = caller.submit("waits")
            drained.result(TIMEOUT_S)
            assert caller.orchestrator.is_paused
            ((ended, event),) = caller.wait(1).items()
            assert (ended, texts(event)) == (runs, ["runs>quick>slow"])
            assert caller.events.empty()
            caller.orchestrator.resume().result(TIMEOUT_S)
            assert not caller.orchestrator.is_paused
            ((ended, event),) = caller.wait(1).items()
            assert (ended, texts(event)) == (waits, ["waits>quick>slow"])

    def test_requests_that_run_are_aborted(self) -> None:
        with running(*STAGES) as caller:
            caller.submit("runs", fake_seconds=FAR, fake_only="slow")
            wait_until(lambda: sum(caller.orchestrator.activity().values()) > 0)
            caller.orchestrator.pause(aborts=True).result(TIMEOUT_S)
            assert isinstance(error_of(caller.wait_one()), RequestAbortedError)
            caller.orchestrator.resume()
            caller.submit("next")
            assert texts(caller.wait_one()) == ["next>quick>slow"]

    def test_a_pause_that_waits_ends_with_a_resume(self) -> None:
        with running(*STAGES) as caller:
            caller.submit("runs", fake_seconds=FAR, fake_only="slow")
            wait_until(lambda: sum(caller.orchestrator.activity().values()) > 0)
            drained = caller.orchestrator.pause()
            caller.orchestrator.resume()
            drained.result(TIMEOUT_S)

    def test_frozen_stages_keep_their_requests(self) -> None:
        with running(*STAGES) as caller:
            caller.orchestrator.control(Freeze(), [1], TIMEOUT_S).result(TIMEOUT_S)
            caller.submit("kept")
            wait_until(lambda: caller.orchestrator.activity() == {"quick": 0, "slow": 1})
            assert caller.events.empty()
            caller.orchestrator.control(Thaw(), [1], TIMEOUT_S).result(TIMEOUT_S)
            assert texts(caller.wait_one()) == ["kept>quick>slow"]

    def test_a_verb_that_the_engine_does_not_know(self) -> None:
        with running(*STAGES) as caller:
            result = caller.orchestrator.control(ResetMMCache(), [0, 1], TIMEOUT_S)
            with pytest.raises(InvalidControlError, match=r"stage 0 \(quick\): this kind of stage does not know"):
                result.result(TIMEOUT_S)
            caller.submit("next")
            assert texts(caller.wait_one()) == ["next>quick>slow"]


def test_requests_are_aborted_by_the_ids_of_their_callers() -> None:
    with running(*STAGES, max_inflight=1) as caller:
        ids = [caller.submit("text", fake_seconds=FAR) for _ in range(3)]
        assert caller.orchestrator.abort_external({ids[0], ids[2], "unknown"}).result(TIMEOUT_S) == 2
        assert {*caller.wait(2)} == {ids[0], ids[2]}
        assert caller.orchestrator.abort_external(None).result(TIMEOUT_S) == 1
        assert {*caller.wait(1)} == {ids[1]}
