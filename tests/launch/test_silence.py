# SPDX-License-Identifier: Apache-2.0
"""Stages that do not answer: `SilenceWatch` with a fake clock, and a process that is stopped."""

import os
import signal

import pytest
from msgspec.structs import replace

from tests.clock import Clock
from tests.launch.test_supervisor import Pipeline
from tests.orchestrator.pipelines import TRIANGLE, Caller, state_of, texts
from tests.orchestrator.test_failure import is_ready, processes, restarts_of, running, wait_until
from vllm_omni.distributed.messages import HEARTBEAT_S
from vllm_omni.launch import supervisor
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.launch.supervisor import UNRESPONSIVE_S, SilenceWatch
from vllm_omni.stage.watchdog import COMPILE_S

ALL = ("a", "b", "c")
TIMEOUT_S = 300.0
"""`step_timeout_s` of the stages."""


class Watched:
    """A pipeline of three stages that are ready, and its orchestrator's thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pipeline = Pipeline(clock)
        self.watch = SilenceWatch(self.pipeline.supervisor)
        self.pipeline.start()

    def pass_time(self, seconds: float, answering: tuple[str, ...] = ALL) -> list[str]:
        """Listens for so long, while some stages send heartbeats; returns the states."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            wait_s = min(HEARTBEAT_S, end - self.clock.now, self.watch.due - self.clock.now)
            self.clock.now += wait_s
            self.listen(wait_s, answering)
        return self.pipeline.states

    def listen(self, wait_s: float = 0.0, answering: tuple[str, ...] = ALL) -> list[str]:
        self.watch.listened(wait_s)
        for name in answering:
            self.watch.heard(self.pipeline.stages[name])
        self.watch.on_timer()
        return self.pipeline.states

    @property
    def kills(self) -> list[int]:
        return [process.kills for process in self.pipeline.server.processes]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return Watched(clock)


def test_a_stage_that_is_silent_is_unresponsive_and_ready_when_it_answers(watched: Watched) -> None:
    assert watched.pass_time(3600.0) == ["ready"] * 3
    assert watched.pass_time(UNRESPONSIVE_S - 0.1, ("a", "b")) == ["ready"] * 3
    assert watched.pass_time(0.1, ("a", "b")) == ["ready", "ready", "unresponsive"]
    assert watched.pass_time(TIMEOUT_S - 1.0, ("a", "b")) == ["ready", "ready", "unresponsive"]
    assert watched.listen() == ["ready"] * 3 and watched.kills == [0, 0, 0]
    assert watched.pass_time(UNRESPONSIVE_S + 1.0, ("a", "b")) == ["ready", "ready", "unresponsive"]


def test_a_stage_that_stays_silent_is_killed_and_the_next_process_is_watched(watched: Watched) -> None:
    pipeline = watched.pipeline
    watched.pass_time(UNRESPONSIVE_S + TIMEOUT_S - 0.1, ("b", "c"))
    assert watched.kills == [0, 0, 0]
    watched.pass_time(0.1, ("b", "c"))
    assert watched.kills == [1, 0, 0]
    pipeline.die(pipeline.server.processes[0])
    assert pipeline.stages["a"].death == "it did not answer for 300 s (runtime.step_timeout_s)"
    assert watched.pass_time(UNRESPONSIVE_S + TIMEOUT_S, ("b", "c")) == ["restarting", "ready", "ready"]
    pipeline.act_at(watched.clock.now)
    pipeline.run_command()
    assert watched.pass_time(UNRESPONSIVE_S + 1.0, ("b", "c")) == ["restarting", "ready", "ready"], "it is loading"
    watched.watch.heard(pipeline.stages["a"])
    pipeline.ready("a")
    assert watched.pass_time(UNRESPONSIVE_S - 0.1, ("b", "c")) == ["ready"] * 3
    assert watched.pass_time(0.1, ("b", "c")) == ["unresponsive", "ready", "ready"]


@pytest.mark.parametrize("wait_s", [0.0, HEARTBEAT_S])
def test_stages_are_not_silent_while_nobody_listens(watched: Watched, wait_s: float) -> None:
    """The orchestrator's thread waited for the interpreter's lock, or all processes were stopped."""
    watched.pass_time(HEARTBEAT_S)
    for _ in range(10):
        watched.clock.now += 1000.0
        watched.watch.on_timer()
        assert watched.listen(wait_s, ()) == ["ready"] * 3
    assert watched.pass_time(UNRESPONSIVE_S - 0.1, ()) == ["ready"] * 3
    assert watched.pass_time(0.1, ()) == ["unresponsive"] * 3
    assert watched.listen() == ["ready"] * 3 and watched.kills == [0, 0, 0]


def test_a_busy_thread_listens(watched: Watched) -> None:
    """Another stage keeps it from ever waiting."""
    states = ["ready"] * 3
    for _ in range(21):
        watched.clock.now += 0.5
        states = watched.listen(0.0, ("a", "b"))
    assert states == ["ready", "ready", "unresponsive"]


def set_limit(stage: StageHandle, seconds: float) -> None:
    """Sets `step_timeout_s` for the orchestrator, not in the stage's process."""
    config = replace(stage.config, runtime=replace(stage.config.runtime, step_timeout_s=seconds))
    stage.instance = replace(stage.instance, stage=config)


def test_a_stage_whose_first_work_may_take_longer_has_that_time(watched: Watched) -> None:
    stage = watched.pipeline.stages["c"]
    watched.watch.heard(stage, COMPILE_S)
    states = watched.pass_time(UNRESPONSIVE_S + TIMEOUT_S + COMPILE_S - 0.1, ("a", "b"))
    assert states == ["ready", "ready", "unresponsive"] and watched.kills == [0, 0, 0]
    assert watched.listen() == ["ready"] * 3
    watched.pass_time(UNRESPONSIVE_S + TIMEOUT_S - 0.1, ("a", "b"))
    assert watched.kills == [0, 0, 0]
    watched.pass_time(0.1, ("a", "b"))
    assert watched.kills == [0, 0, 1], "its later work has no more than others"


def test_without_a_limit_nothing_is_killed(watched: Watched) -> None:
    set_limit(watched.pipeline.stages["c"], 0.0)
    watched.pass_time(10 * TIMEOUT_S, ("a", "b"))
    assert watched.pipeline.states == ["ready", "ready", "unresponsive"] and watched.kills == [0, 0, 0]
    assert watched.listen() == ["ready"] * 3


@pytest.mark.slow  # Heartbeats have to stay away.
def test_a_stopped_process_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "UNRESPONSIVE_S", HEARTBEAT_S + 1.0)

    def wait_until_unresponsive(caller: Caller) -> None:
        os.kill(processes(caller)["b"], signal.SIGSTOP)
        caller.submit("b")
        wait_until(lambda: state_of(caller.orchestrator)["b"] == "unresponsive")

    with running(*TRIANGLE) as caller:
        wait_until_unresponsive(caller)
        os.kill(processes(caller)["b"], signal.SIGCONT)
        assert texts(caller.wait_one())[1] == "b>a+b>a>b>c"
        wait_until(lambda: is_ready(caller))
        assert restarts_of(caller, "b") == 0
        set_limit(caller.orchestrator._stages[1], 1.0)
        wait_until_unresponsive(caller)
        assert texts(caller.wait_one())[1] == "b>a+b>a>b>c", "it is tried again in the next process"
        assert restarts_of(caller, "b") == 1
        last_death = {stage.name: stage.last_death for stage in caller.orchestrator.health()}
        assert last_death["b"] == "it did not answer for 1 s (runtime.step_timeout_s)"
