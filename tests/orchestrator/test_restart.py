# SPDX-License-Identifier: Apache-2.0
"""Several stages restart at once, late messages of dead ones, failed restarts: every request ends."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from tests.orchestrator.pipelines import (
    FAR,
    TRIANGLE,
    Caller,
    error_of,
    fake_stage,
    kept_server,
    make_config,
    opened,
    state_of,
    texts,
)
from tests.orchestrator.test_failure import is_ready, kill, processes, raw_socket, restarts_of, wait_until
from vllm_omni.distributed.messages import ReadyMessage, send
from vllm_omni.distributed.run_dir import orchestrator_address
from vllm_omni.errors import StageDeadError
from vllm_omni.launch.fork_server import ForkServer, StageProcess
from vllm_omni.stage.spec import StageSpec

PAIR = (fake_stage(0, "a"), fake_stage(1, "b", (0,), "text"))
SLOW = fake_stage(1, "b", (0,), "audio") | {
    "engine_type": "function",
    "function": "tests.orchestrator.slow_to_load.speak",
}


class Gate(ForkServer):
    """Decides when a stage restarts, and whether."""

    def __init__(self) -> None:
        self.is_broken = False
        self.before_return: Callable[[], None] = lambda: None
        self._open = {name: threading.Event() for name in "abc"}
        for name in self._open:
            self.open(name)

    def open(self, name: str) -> None:
        self._open[name].set()

    def shut(self, name: str) -> None:
        self._open[name].clear()

    def fork(self, spec: bytes, timeout: float) -> StageProcess:
        self._open[msgspec.json.decode(spec, type=StageSpec).stage.name].wait()
        if self.is_broken:
            raise EOFError("the server is broken")
        process = kept_server().fork(spec, timeout)
        self.before_return()
        return process

    def close(self) -> None:
        self.is_broken = True
        for gate in self._open.values():
            gate.set()


@contextmanager
def running(*stages: dict) -> Iterator[tuple[Caller, Gate]]:
    config = make_config(*(stages or PAIR), restart={"backoff_s": 0.0, "max_restarts": 10})
    gate = Gate()
    with opened(config, server=gate) as caller:
        yield caller, gate


def kill_and_wait(caller: Caller, name: str) -> None:
    num_restarts = restarts_of(caller, name)
    kill(caller, name)
    wait_until(lambda: restarts_of(caller, name) > num_restarts)


def wait_until_a(caller: Caller, **figures: int) -> None:
    """Waits for this statistic of stage `a`."""
    wait_until(
        lambda: any(
            stats.name == "a" and all(getattr(stats, name) == figure for name, figure in figures.items())
            for stats in caller.orchestrator.stats()
        )
    )


def test_health_reports_a_restarting_stage_and_requests_wait_for_it() -> None:
    with running(*TRIANGLE) as (caller, gate):
        gate.shut("b")
        kill_and_wait(caller, "b")
        waiting = caller.submit("waits for b")
        spared = caller.submit("does not need b", ("text",))
        assert caller.wait_one().request_id == spared
        assert state_of(caller.orchestrator) == {"a": "ready", "b": "restarting", "c": "ready"}
        gate.open("b")
        end = caller.wait_one()
        assert end.request_id == waiting
        assert texts(end)[1] == "waits for b>a+waits for b>a>b>c"
        assert is_ready(caller)


def test_output_that_is_lost_while_its_target_restarts() -> None:
    with running(PAIR[0], SLOW) as (caller, gate):
        gate.shut("b")
        first = caller.submit("first at a", fake_seconds=FAR, fake_only="a")
        held = caller.submit("held by a for b")
        wait_until_a(caller, num_enqueued=2)
        kill_and_wait(caller, "b")
        caller.orchestrator.abort([first])
        assert caller.wait_one().request_id == first
        wait_until_a(caller, num_completed=1)
        wait_until(lambda: caller.orchestrator.activity() == {"a": 0, "b": 1})
        kill_and_wait(caller, "a")
        gate.open("b")
        end = caller.wait_one()
        assert end.request_id == held and texts(end) == ["held by a for b>a>b"], "a makes it again"
        caller.submit("next")
        assert texts(caller.wait_one()) == ["next>a>b"]


def test_a_stage_that_restarts_first_waits_for_the_other() -> None:
    """The output of `a` must not be sent before `b` is ready."""
    with running() as (caller, gate):
        gate.shut("b")
        kill_and_wait(caller, "b")
        kill_and_wait(caller, "a")
        wait_until(lambda: state_of(caller.orchestrator)["a"] == "ready")
        caller.submit("large", fake_bytes=300_000)
        wait_until_a(caller, num_enqueued=1)
        gate.open("b")
        assert texts(caller.wait_one()) == ["large>a>b"]


def test_a_late_message_of_a_dead_process_is_not_attributed_to_its_successor() -> None:
    with running() as (caller, gate):
        gate.shut("b")
        kill_and_wait(caller, "b")
        with raw_socket(orchestrator_address(caller.orchestrator._run_dir.path)) as sock:
            send(sock, ReadyMessage(instance_id=1, epoch=0, address="ipc://nowhere"), sender=1)
            caller.submit("p", fake_bytes=300_000)
            wait_until_a(caller, num_enqueued=1)
            assert state_of(caller.orchestrator)["b"] == "restarting"
            gate.open("b")
            assert texts(caller.wait_one()) == ["p>a>b"]


def test_requests_fail_when_a_stage_cannot_be_restarted() -> None:
    with running() as (caller, gate):
        gate.shut("b")
        kill_and_wait(caller, "b")
        caller.submit("waits for b")
        wait_until_a(caller, num_enqueued=1)
        gate.is_broken = True
        gate.open("b")
        error = error_of(caller.wait_one())
        assert isinstance(error, StageDeadError) and "the server is broken" in str(error)
        assert state_of(caller.orchestrator) == {"a": "ready", "b": "dead"}


def test_files_of_processes_that_died_in_turn_are_removed() -> None:
    with running(PAIR[0], SLOW) as (caller, _):
        caller.submit("p", size=300_000)
        caller.wait_one()
        num_deaths = 2  # the second process while it loads
        for _ in range(num_deaths):
            wait_until(lambda: "b" in processes(caller))
            kill_and_wait(caller, "b")
        wait_until(lambda: is_ready(caller) and len(processes(caller)) == 2)
        pids = [f"-{pid}-" for pid in (*processes(caller).values(), os.getpid())]
        names = [path.name for path in caller.orchestrator._run_dir.path.iterdir() if "payload" in path.name]
        assert [name for name in names if not any(pid in name for pid in pids)] == []


def test_a_process_that_is_ready_before_its_fork_is_reported_is_not_overdue() -> None:
    with running() as (caller, gate):
        gate.before_return = lambda: wait_until(lambda: is_ready(caller))
        kill_and_wait(caller, "b")
        wait_until(lambda: len(processes(caller)) == 2)
        assert caller.orchestrator._supervisor.due is None
