# SPDX-License-Identifier: Apache-2.0
"""Processes that end slowly, or not at all: only the requests that they held are affected."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked_programs import QuickForkServer
from tests.orchestrator.pipelines import (
    FAR,
    Caller,
    error_of,
    fake_stage,
    function_stage,
    make_config,
    opened,
    texts,
)
from tests.orchestrator.test_failure import is_ready, kill, processes, restarts_of, wait_until
from vllm_omni.errors import StageCrashError
from vllm_omni.inputs import StageRequest
from vllm_omni.launch import supervisor
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow

QUICKLY = {"backoff_s": 0.01, "max_restarts": 20}


def leave_a_child(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function that never ends, in a process whose child keeps all inherited descriptors open.

    The child ends with the test, which holds the other end of a pipe.
    """
    with open(request.options["pipe"], "rb") as pipe:
        os.fork()
        pipe.read()
    os._exit(1)


def hang(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function whose process closes its lifeline and does not end."""
    frame = sys._getframe()
    while "lifeline" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["lifeline"].close()
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


A, B = fake_stage(0, "a", (), "text"), fake_stage(1, "b", (), "audio")


@contextmanager
def running(*stages: dict) -> Iterator[tuple[Caller, QuickForkServer]]:
    config = make_config(*stages, restart=QUICKLY)
    server = QuickForkServer()
    with opened(config, server=server) as caller:
        yield caller, server


@contextmanager
def stopped(server: QuickForkServer) -> Iterator[None]:
    """The server cannot reap in the meantime."""
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


def hold_at_b(caller: Caller) -> str:
    held = caller.submit("held", ("audio",), fake_seconds=FAR)
    wait_until(lambda: caller.orchestrator.activity()["b"] == 1)
    return held


def test_the_death_of_a_process_with_a_living_child_is_noticed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        open(os.open(pipe, os.O_RDWR), "wb"),
        running(A, function_stage(1, "b", leave_a_child, (), "audio")) as (caller, _),
    ):
        held = caller.submit("held", ("audio",), pipe=str(pipe))
        b = psutil.Process(processes(caller)["b"])
        wait_until(lambda: len(b.children()) == 1)
        (child,) = b.children()
        kill(caller, "b")
        wait_until(lambda: restarts_of(caller, "b") == 1 and is_ready(caller))
        assert caller.orchestrator.health()[1].last_death == "it was killed by SIGKILL"
        caller.orchestrator.abort([held])
        assert caller.wait_one().request_id == held
        assert child.is_running()


def test_a_process_that_hangs_without_its_lifeline_delays_no_restart() -> None:
    with running(A, function_stage(1, "b", hang, (), "audio")) as (caller, _):
        caller.submit("hang", ("audio",))
        assert isinstance(error_of(caller.wait_one()), StageCrashError)
        caller.submit("p", ("text",), fake_die="a")
        assert isinstance(error_of(caller.wait_one()), StageCrashError)
        caller.submit("again", ("text",))
        assert texts(caller.wait_one()) == ["again>a"]
        wait_until(lambda: is_ready(caller))


def test_requests_continue_while_a_process_is_not_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(A, B) as (caller, server), monkeypatch.context() as patch:
        patch.setattr(supervisor, "END_GRACE_S", FAR)
        held = hold_at_b(caller)
        with stopped(server):
            b = psutil.Process(processes(caller)["b"])
            kill(caller, "b")
            wait_until(lambda: b.status() == psutil.STATUS_ZOMBIE)
            for i in range(3):
                other = caller.submit(f"p{i}", ("text",))
                assert caller.wait_one().request_id == other
        wait_until(lambda: restarts_of(caller, "b") == 1 and is_ready(caller))
        assert caller.orchestrator.health()[1].last_death == "it was killed by SIGKILL"
        caller.orchestrator.abort([held])  # It is tried again.
        assert caller.wait_one().request_id == held


def test_a_process_that_does_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_GRACE_S", 0.1)
    with running(A, B) as (caller, server):
        held = hold_at_b(caller)
        with stopped(server):
            kill(caller, "b")
            wait_until(lambda: restarts_of(caller, "b") == 1)
            assert "has not ended yet" in caller.orchestrator.health()[1].last_death
            caller.orchestrator.abort([held])  # It waits for the next process.
            assert caller.wait_one().request_id == held
        wait_until(lambda: is_ready(caller))


def test_a_pipeline_closes_although_no_process_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SHUTDOWN_GRACE_S", 0.1)
    monkeypatch.setattr(supervisor, "END_GRACE_S", 0.1)
    with running(A, B) as (caller, server):
        left = [psutil.Process(pid) for pid in processes(caller).values()]
        os.kill(server._process.pid, signal.SIGSTOP)
        caller.orchestrator.close()
    for process in left:
        process.wait()
