# SPDX-License-Identifier: Apache-2.0
"""Dead processes, full memory, invalid messages: which requests fail, which continue, and what remains."""

import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
import zmq

from tests.forked_programs import QuickForkServer
from tests.orchestrator.pipelines import (
    FAR,
    TIMEOUT_S,
    TRIANGLE,
    Caller,
    error_of,
    fake_stage,
    fresh_stats,
    function_stage,
    make_config,
    opened,
    state_of,
    texts,
)
from tests.small_cgroup import small_cgroup
from vllm_omni.distributed.messages import PROTOCOL_VERSION, DataMessage, InlineRef, send
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.errors import RequestAbortedError, StageCrashError, StageDeadError, StageExecutionError
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator import orchestrator as orchestrators
from vllm_omni.outputs import StageOutput

QUICKLY = {"backoff_s": 0.05, "max_restarts": 20}


@contextmanager
def running(*stages: dict, **runtime: Any) -> Iterator[Caller]:
    config = make_config(*stages, restart=runtime.pop("restart", QUICKLY), **runtime)
    with opened(config) as caller:
        caller.submit("once through all stages, so that all are connected")
        caller.wait_one()
        yield caller


def processes(caller: Caller) -> dict[str, int]:
    """Process ids by the names of replicas."""
    stages = caller.orchestrator._supervisor.stages
    return {stage.handle.instance.name: stage.process.pid for stage in stages if stage.process}


def kill(caller: Caller, name: str) -> None:
    os.kill(processes(caller)[name], signal.SIGKILL)


def wait_until(condition: Callable[[], bool], describe: Callable[[], str] = lambda: "it never became true") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)  # there is nothing to be woken by: what is awaited is seen from outside


def restarts_of(caller: Caller, name: str) -> int:
    return next(stage.num_restarts for stage in caller.orchestrator.health() if stage.name == name)


def payload_files(caller: Caller) -> list[str]:
    """Payloads that were not received, and segments of dead processes."""
    names = [path.name for path in caller.orchestrator._run_dir.path.iterdir()]
    kept = tuple(f"pool-payload-{pid}-" for pid in (os.getpid(), *processes(caller).values()))
    return [name for name in names if "payload-" in name and not name.startswith(kept)]


def is_ready(caller: Caller) -> bool:
    return set(state_of(caller.orchestrator).values()) == {"ready"}


def limit_files(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function for which the memory file system is full: files are limited to 1 MB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    return {"text": request.prompt, "bytes": torch.zeros(request.options.get("size", 0), dtype=torch.uint8)}


def test_a_killed_stage_restarts_and_its_requests_are_tried_again() -> None:
    """`b` dies while it works. The requests of `a` and `c`, and those that `b` has not received yet, continue."""
    with running(*TRIANGLE) as caller:
        first_at_c = caller.submit("first at c", fake_seconds=FAR, fake_only="c")
        at_c = caller.submit("at c")
        wait_until(lambda: fresh_stats(caller.orchestrator)[2].num_enqueued == 3)
        at_b = [caller.submit(f"at b {i}", fake_seconds=FAR, fake_only="b") for i in range(3)]
        wait_until(lambda: caller.orchestrator.activity()["b"] == 3)
        first_at_a = caller.submit("first at a", fake_seconds=FAR, fake_only="a")
        at_a = [caller.submit(f"at a {i}") for i in range(3)]
        text = caller.submit("text", ("text",))
        wait_until(lambda: caller.orchestrator.activity()["a"] == 5)
        kill(caller, "b")
        wait_until(lambda: restarts_of(caller, "b") == 1)
        caller.orchestrator.abort([first_at_a, first_at_c])
        ends = caller.wait(7)
        wait_until(lambda: caller.orchestrator.activity()["b"] == 1)
        caller.orchestrator.abort(at_b[:1])  # The first of them works again.
        caller.submit("not before them")
        caller.orchestrator.abort(at_b[1:])
        ends |= caller.wait(4)
        assert {type(error_of(ends[request_id])) for request_id in at_b} == {RequestAbortedError}
        assert texts(ends[at_c])[0] == "at c>a"
        assert [texts(ends[r])[1] for r in at_a] == [f"at a {i}>a+at a {i}>a>b>c" for i in range(3)]
        assert texts(ends[text]) == ["text>a"]
        health = {stage.name: stage for stage in caller.orchestrator.health()}
        assert (health["b"].state, health["b"].num_restarts) == ("ready", 1)
        assert health["b"].last_death == "it was killed by SIGKILL"
        assert health["a"].num_restarts == 0


def test_a_stage_that_its_control_group_kills_for_memory_is_replaced() -> None:
    """The request that took the memory is tried again: the next process is not in that group."""
    with running(*TRIANGLE) as caller, small_cgroup(64 << 20) as group:
        waiting = caller.submit("waits at c", fake_seconds=FAR, fake_only="c")
        wait_until(lambda: caller.orchestrator.activity() == {"a": 0, "b": 0, "c": 1})
        (group / "cgroup.procs").write_text(str(processes(caller)["b"]))
        large = caller.submit("large", fake_bytes=150 << 20, fake_only="b")
        text = caller.submit("text", ("text",))
        assert texts(caller.wait_one()) == ["text>a"]
        wait_until(lambda: restarts_of(caller, "b") == 1)
        caller.orchestrator.abort([waiting])
        ends = caller.wait(2)
        assert ends.keys() == {waiting, large} and text not in ends
        assert texts(ends[large])[1] == "large>a+large>a>b>c"
        assert caller.orchestrator.health()[1].last_death == "it was killed by SIGKILL"
        assert is_ready(caller)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_stream_goes_on_when_a_stage_has_died(name: str) -> None:
    edges = [
        {"from": 0, "to": 1, "window_size": 2, "unit": "rows"},
        {"from": 1, "to": 2, "window_size": 2, "unit": "rows"},
    ]
    chain = (fake_stage(0, "a", (), "text"), fake_stage(1, "b", (0,)), fake_stage(2, "c", (1,), "audio"))
    with running(*chain, edges=edges) as caller:
        expected = texts(caller.events_of(caller.submit("p", fake_tokens=100))[-1])
        caller.submit("p", streams=True, fake_tokens=100, fake_seconds=0.01, fake_only="a")
        received = []
        while not (isinstance(event := caller.next(), ARSegmentEvent) and event.stage_id == 2):
            received.append(event)
        received.append(event)
        kill(caller, name)
        while not (event := caller.next()).is_terminal:
            received.append(event)
        assert texts(event) == expected
        for stage_id, text in zip((0, 2), expected, strict=True):
            assert "".join(each.text for each in received if each.stage_id == stage_id) == text
        wait_until(lambda: is_ready(caller))
        caller.submit("again", fake_tokens=5)
        assert texts(caller.wait_one())[1] == "0 1 2 3 4 >b>c"


def test_a_request_that_kills_its_stage_is_tried_once_more_and_others_are_served() -> None:
    with running(*TRIANGLE) as caller:
        bad = [caller.submit(f"bad {i}", fake_die="b") for i in range(3)]
        good = [caller.submit(f"good {i}") for i in range(3)]
        ends = caller.wait(6)
        for request_id in bad:
            error = error_of(ends[request_id])
            assert (
                isinstance(error, StageCrashError) and error.stage_id == 1 and "it was killed by SIGKILL" in str(error)
            )
        for number, request_id in enumerate(good):
            assert texts(ends[request_id])[0] == f"good {number}>a"
        assert restarts_of(caller, "b") <= 6 and restarts_of(caller, "a") == 0


def test_a_stage_that_dies_too_often_is_dead_for_the_longest_back_off() -> None:
    with running(*TRIANGLE, restart={"max_restarts": 1, "backoff_s": 0.01, "max_backoff_s": 3.0}) as caller:
        caller.submit("p", fake_die="b")
        assert isinstance(error_of(caller.wait_one()), StageCrashError)
        wait_until(lambda: state_of(caller.orchestrator)["b"] == "dead")
        caller.submit("needs b")
        error = error_of(caller.wait_one())
        assert isinstance(error, StageDeadError) and error.retry_after_s == 3.0
        caller.submit("does not", ("text",))
        assert texts(caller.wait_one()) == ["does not>a"]
        wait_until(lambda: is_ready(caller))
        caller.submit("again")
        assert texts(caller.wait_one())[0] == "again>a"


def test_stages_restart_although_the_fork_server_died() -> None:
    config = make_config(*TRIANGLE, restart=QUICKLY)
    server = QuickForkServer()
    with opened(config, server=server) as caller:
        os.kill(server._process.pid, signal.SIGKILL)
        caller.submit("next")
        assert texts(caller.wait_one())[0] == "next>a"
        caller.submit("p", fake_die="a")
        assert isinstance(error_of(caller.wait_one()), StageCrashError)
        caller.submit("again")
        assert texts(caller.wait_one())[0] == "again>a"
    assert not [child for child in psutil.Process().children(recursive=True) if child.pid == server._process.pid]


def test_files_of_a_dead_process_are_removed() -> None:
    with running(*TRIANGLE) as caller:
        b = psutil.Process(processes(caller)["b"])
        b.suspend()
        for _ in range(5):
            caller.submit("p", fake_bytes=300_000)
        wait_until(lambda: caller.orchestrator.activity()["b"] > 0)
        b.kill()
        caller.wait(5)
        wait_until(lambda: is_ready(caller))
        wait_until(lambda: payload_files(caller) == [])  # what was sent to `c` is still to be dropped


def test_payloads_for_a_dead_process_are_removed_before_the_next_one_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    with running(*TRIANGLE) as caller:
        monkeypatch.setattr(
            orchestrators, "remove_payloads", lambda *_: states.append(state_of(caller.orchestrator)["b"])
        )
        kill(caller, "b")
        wait_until(lambda: restarts_of(caller, "b") == 1 and is_ready(caller))
        assert states == ["restarting"]


def test_full_memory_fails_the_request_that_does_not_fit() -> None:
    stages = (function_stage(0, "maker", limit_files, (), "text"), fake_stage(1, "reader", (0,), "audio"))
    with running(*stages) as caller:
        large = caller.submit("large", size=2_000_000)
        small = caller.submit("small", size=200_000)
        ends = caller.wait(2)
        error = error_of(ends[large])
        assert isinstance(error, StageExecutionError) and "stage 0 (maker): OSError" in str(error)
        assert texts(ends[small]) == ["small", "small>reader"]


@contextmanager
def raw_socket(address: str) -> Iterator[zmq.Socket]:
    """Sends to a stage, or to the orchestrator, what their peers would not."""
    sock = zmq.Context.instance().socket(zmq.PUSH)
    sock.connect(address)
    try:
        yield sock
    finally:
        sock.close(linger=0)


def address_of_b(caller: Caller) -> str:
    return stage_address(caller.orchestrator._run_dir.path, 1, 0)


def test_a_payload_that_cannot_be_decoded_fails_its_request() -> None:
    with running(*TRIANGLE) as caller, raw_socket(address_of_b(caller)) as sock:
        victim = caller.submit("p", fake_seconds=FAR, fake_only="a")
        wait_until(lambda: caller.orchestrator.activity()["a"] == 1)
        message = DataMessage(
            request_id=victim, number=2, source=0, sequence=0, is_last=True, sent=0.0, payload=InlineRef(sizes=[3])
        )
        send(sock, message, [b"bad"], sender=0)
        error = error_of(caller.wait_one())
        assert isinstance(error, StageExecutionError) and error.request_id == victim and error.stage_id == 1
        caller.submit("next")
        assert texts(caller.wait_one())[0] == "next>a"


def test_a_stage_of_another_version_is_replaced() -> None:
    with running(*TRIANGLE) as caller, raw_socket(address_of_b(caller)) as sock:
        sock.send(b"no header at all")
        sock.send(struct.pack("<4sHi", b"omni", PROTOCOL_VERSION + 1, 0) + b"from the future")
        wait_until(lambda: restarts_of(caller, "a") == 1 and is_ready(caller))
        assert f"its protocol version is {PROTOCOL_VERSION + 1}" in caller.orchestrator.health()[0].last_death
        caller.submit("next")
        assert isinstance(caller.wait_one(), CompletedEvent)
