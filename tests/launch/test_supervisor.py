# SPDX-License-Identifier: Apache-2.0
"""`Supervisor` with a fake fork server and a fake clock: starts, deaths, restarts with back-off, and the end."""

import queue
from collections.abc import Callable
from typing import Any

import pytest

from tests.clock import Clock
from tests.orchestrator.pipelines import TIMEOUT_S, TRIANGLE, make_config
from vllm_omni.config.stage_config import RestartConfig
from vllm_omni.distributed.messages import ShutdownMessage
from vllm_omni.errors import PipelineClosedError, StageStartError
from vllm_omni.launch import supervisor as supervisor_module
from vllm_omni.launch.fake import FakeLauncher, FakeProcess, FakeStage
from vllm_omni.launch.supervisor import Supervisor
from vllm_omni.metrics.stats import StageState

INIT_TIMEOUT_S = 60.0
END_GRACE_S = 2.0
BACKOFF_S = 1.0


class Pipeline:
    """A supervisor of stages a, b and c."""

    def __init__(self, clock: Clock, **restart: Any) -> None:
        self.clock = clock
        self.log: list[tuple[str, Any]] = []
        config = make_config(*TRIANGLE)
        self.stages = {replica.name: FakeStage(replica, self.log) for replica in config.instances.values()}
        for stage in self.stages.values():
            stage.state = StageState.STARTING
        a, b, c = self.stages.values()
        self.server = FakeLauncher()
        self.down: list[str] = []
        self.waiting: list[str] = []
        self.is_closed = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.supervisor = Supervisor(
            [a, b, c],
            self.server,
            RestartConfig(**{"backoff_s": BACKOFF_S, "max_backoff_s": 3.0, "window_s": 100.0, **restart}),
            INIT_TIMEOUT_S,
            self._command,
            lambda stage: self.down.append(stage.config.name),
            lambda stage: self.waiting.append(stage.config.name),
        )

    def _command(self, command: Callable[[], None]) -> None:
        if self.is_closed:
            raise PipelineClosedError("closed")
        self._commands.put(command)

    def run_command(self) -> None:
        """Waits for the restart thread, and runs its command on this one."""
        self._commands.get(timeout=TIMEOUT_S)()

    def start(self) -> None:
        self.supervisor.start_all(100.0)
        self.ready("a", "b", "c")
        self.supervisor.restarts = True

    def ready(self, *names: str) -> None:
        for name in names:
            self.supervisor.on_ready(self.stages[name], f"address of {name}")

    def die(self, process: FakeProcess) -> None:
        process.has_ended = True
        self.supervisor.handle_deaths({process.pid})

    def act_at(self, now: float) -> None:
        self.clock.now = now
        self.supervisor.on_timer()

    @property
    def states(self) -> list[str]:
        assert [stage.state for stage in self.supervisor.health] == [s.state.value for s in self.stages.values()]
        return [stage.state for stage in self.supervisor.health]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor_module, "time", clock)
    return clock


@pytest.fixture
def pipeline(clock: Clock) -> Pipeline:
    return Pipeline(clock)


def test_each_stage_has_a_process(pipeline: Pipeline) -> None:
    pipeline.supervisor.start_all(100.0)
    assert pipeline.server.specs == [("a", 0), ("b", 0), ("c", 0)]
    assert pipeline.supervisor.filenos() == [1000, 1001, 1002]
    assert pipeline.states == ["starting"] * 3 and pipeline.supervisor.due == 1000.0 + INIT_TIMEOUT_S


def test_nothing_is_due_once_all_stages_are_ready(pipeline: Pipeline) -> None:
    pipeline.supervisor.start_all(100.0)
    pipeline.ready("a", "c")
    assert pipeline.states == ["ready", "starting", "ready"]
    assert pipeline.supervisor.due == 1000.0 + INIT_TIMEOUT_S
    pipeline.ready("b")
    assert pipeline.states == ["ready"] * 3 and pipeline.supervisor.due is None


def test_a_process_that_cannot_be_forked_fails_the_start(pipeline: Pipeline) -> None:
    pipeline.server.errors = [OSError("no memory")]
    with pytest.raises(StageStartError, match=r"stage 0 \(a\) could not be started: no memory") as error:
        pipeline.supervisor.start_all(100.0)
    assert error.value.stage_id == 0


def test_a_death_during_the_start_is_not_followed_by_a_restart(pipeline: Pipeline) -> None:
    pipeline.supervisor.start_all(100.0)
    pipeline.die(pipeline.server.processes[0])
    assert pipeline.down == ["a"] and pipeline.stages["a"].death == "it exited with status 1"
    assert pipeline.supervisor.due == 1000.0 + INIT_TIMEOUT_S, "only the other processes are awaited"
    assert pipeline.supervisor.filenos() == [1001, 1002]


def test_only_processes_with_a_readable_descriptor_are_checked(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.server.processes[0].has_ended = True
    pipeline.supervisor.handle_deaths({1001, 1002, 7})
    assert pipeline.down == [] and pipeline.states == ["ready"] * 3


def test_a_process_that_is_not_ready_in_time_is_killed(pipeline: Pipeline) -> None:
    pipeline.start()
    first, *_ = pipeline.server.processes
    pipeline.die(first)
    pipeline.act_at(1000.0 + BACKOFF_S)
    pipeline.run_command()
    second = pipeline.server.processes[-1]
    late = 1000.0 + BACKOFF_S + INIT_TIMEOUT_S
    pipeline.act_at(late - 0.1)
    assert second.kills == 0 and pipeline.supervisor.due == late
    pipeline.act_at(late)
    assert second.kills == 1 and pipeline.supervisor.due == late + END_GRACE_S
    pipeline.die(second)
    assert pipeline.stages["a"].death == f"it was not ready after {INIT_TIMEOUT_S:g} s; raise stage_init_timeout"
    assert second.is_closed


def test_a_dead_process_is_restarted(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.die(pipeline.server.processes[0])
    assert pipeline.down == ["a"] and pipeline.states == ["restarting", "ready", "ready"]
    assert pipeline.supervisor.due == 1000.0 + BACKOFF_S
    pipeline.act_at(1000.0 + BACKOFF_S)
    assert pipeline.supervisor.due is None, "one restart is in progress"
    pipeline.run_command()
    assert pipeline.server.specs[-1] == ("a", 1)
    assert pipeline.supervisor.filenos() == [1003, 1001, 1002]
    pipeline.ready("a")
    assert pipeline.supervisor.due is None and pipeline.states == ["ready"] * 3
    assert [stage.num_restarts for stage in pipeline.supervisor.health] == [1, 0, 0]
    assert [stage.last_death for stage in pipeline.supervisor.health] == ["it exited with status 1", "", ""]


def restart(pipeline: Pipeline) -> float:
    """Lets the process of stage c die and restart; returns the back-off."""
    pipeline.die(pipeline.server.processes[-1])
    due = pipeline.supervisor.due
    assert due is not None
    backoff = due - pipeline.clock.now
    pipeline.act_at(due)
    pipeline.run_command()
    pipeline.ready("c")
    return backoff


def test_the_back_off_doubles_up_to_its_limit_within_the_window(pipeline: Pipeline) -> None:
    pipeline.start()
    assert [restart(pipeline) for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    pipeline.clock.now += 200.0
    assert restart(pipeline) == 1.0


def test_a_stage_that_dies_too_often_is_dead_until_it_has_started_again(clock: Clock) -> None:
    pipeline = Pipeline(clock, max_restarts=2)
    pipeline.start()
    for _ in range(2):
        restart(pipeline)
    pipeline.die(pipeline.server.processes[-1])
    assert pipeline.states == ["ready", "ready", "dead"]
    assert pipeline.down == ["c"] * 3, "the router is notified also of the last death"
    due = clock.now + 3.0
    assert pipeline.supervisor.due == due
    pipeline.act_at(due)
    pipeline.run_command()
    assert pipeline.states == ["ready", "ready", "dead"]
    assert restart(pipeline) == 3.0, "it dies again before it is ready"
    assert pipeline.states == ["ready"] * 3


def test_a_stage_can_stay_dead(clock: Clock) -> None:
    pipeline = Pipeline(clock, max_restarts=0)
    pipeline.start()
    pipeline.die(pipeline.server.processes[-1])
    assert pipeline.states == ["ready", "ready", "dead"] and pipeline.supervisor.due is None


def test_a_failed_restart_counts_as_a_death(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.server.errors = [EOFError("the fork server ended")]
    pipeline.die(pipeline.server.processes[2])
    pipeline.act_at(1000.0 + BACKOFF_S)
    pipeline.run_command()
    assert pipeline.down == ["c", "c"] and pipeline.stages["c"].death == "the fork server ended"
    assert pipeline.supervisor.due == 1000.0 + BACKOFF_S + 2 * BACKOFF_S
    pipeline.act_at(pipeline.supervisor.due)
    pipeline.run_command()
    assert pipeline.server.specs[-1] == ("c", 2)


def test_a_restart_that_waits_for_a_node_is_reported(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.server.waits_for = "a node"
    pipeline.die(pipeline.server.processes[0])
    pipeline.act_at(1000.0 + BACKOFF_S)
    pipeline.run_command()
    assert pipeline.waiting == ["a"]
    assert [stage.waits_for for stage in pipeline.supervisor.health] == ["a node", "", ""]
    pipeline.run_command()
    assert [stage.waits_for for stage in pipeline.supervisor.health] == [""] * 3


def test_stages_that_are_ready_before_their_process_is_known(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.die(pipeline.server.processes[2])
    pipeline.act_at(1000.0 + BACKOFF_S)
    pipeline.ready("c")
    pipeline.run_command()
    assert pipeline.supervisor.due is None and pipeline.supervisor.filenos() == [1000, 1001, 1003]


def test_a_process_that_is_forked_after_the_end_is_killed(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.start()
    pipeline.die(pipeline.server.processes[2])
    pipeline.is_closed = True
    killed = queue.SimpleQueue[None]()
    monkeypatch.setattr(FakeProcess, "kill", lambda process: killed.put(None))
    pipeline.act_at(1000.0 + BACKOFF_S)
    killed.get(timeout=TIMEOUT_S)
    assert pipeline.supervisor.filenos() == [1000, 1001]


def test_a_process_that_is_ending_has_some_time_for_it(pipeline: Pipeline) -> None:
    pipeline.start()
    process = pipeline.server.processes[2]
    process.has_failed = True
    pipeline.supervisor.handle_deaths({process.pid})
    pipeline.clock.now += 1.0
    pipeline.supervisor.handle_deaths({process.pid})
    assert pipeline.down == [] and pipeline.supervisor.due == 1000.0 + END_GRACE_S
    pipeline.act_at(1000.0 + END_GRACE_S)
    assert process.kills == 1 and process.is_closed and pipeline.down == ["c"]


def test_the_reason_for_a_kill_is_reported_as_the_death(pipeline: Pipeline) -> None:
    pipeline.start()
    process = pipeline.server.processes[2]
    stage: Any = pipeline.stages["c"]
    pipeline.supervisor.kill(stage, "a message from it cannot be decoded")
    pipeline.supervisor.kill(stage, "another reason")
    assert process.kills == 2 and pipeline.down == []
    pipeline.die(process)
    assert stage.death == "a message from it cannot be decoded"
    pipeline.supervisor.kill(stage, "it has no process")
    pipeline.act_at(1000.0 + BACKOFF_S)
    pipeline.run_command()
    pipeline.die(pipeline.server.processes[-1])
    assert stage.death == "it exited with status 1"


def test_stopping_asks_ready_stages_and_kills_the_others(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.start()
    first, second, third = pipeline.server.processes
    pipeline.stages["c"].state = StageState.STARTING
    waits: list[tuple[list[FakeProcess], float]] = []

    def wait_for_all(processes: list[FakeProcess], timeout: float) -> list[FakeProcess]:
        waits.append((list(processes), timeout))
        return [first] if len(waits) == 1 else []

    monkeypatch.setattr(supervisor_module, "wait_for_all", wait_for_all)
    pipeline.supervisor.stop_all()
    assert pipeline.log == [("a", ShutdownMessage()), ("b", ShutdownMessage())]
    assert waits == [([first, second, third], 10.0), ([first], END_GRACE_S)]
    assert (first.kills, second.kills, third.kills) == (1, 0, 1), "one did not stop in time, one was still loading"
    assert first.is_closed and second.is_closed and third.is_closed
