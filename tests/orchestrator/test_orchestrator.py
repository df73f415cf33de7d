# SPDX-License-Identifier: Apache-2.0
"""A pipeline of fake stages, each a real process: routing, failure, and what is left behind."""

import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.errors import (
    PipelineClosedError,
    RequestAbortedError,
    StageDeadError,
    StageExecutionError,
    StageStartError,
)
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.orchestrator import Orchestrator, PipelineRequest, TerminalEvent
from vllm_omni.orchestrator.run_dir import RunDir
from vllm_omni.stage.fork_server import ForkServer

# a makes text; b reads a; c reads a and b and makes "audio".
CONFIG = parse_pipeline_config(
    {
        "stage_args": [
            {"stage_id": 0, "engine_type": "fake", "engine_args": {"model_stage": "a"},
             "final_output": True, "final_output_type": "text"},
            {"stage_id": 1, "engine_type": "fake", "engine_args": {"model_stage": "b"}, "engine_input_source": [0]},
            {"stage_id": 2, "engine_type": "fake", "engine_args": {"model_stage": "c"}, "engine_input_source": [0, 1],
             "final_output": True, "final_output_type": "audio"},
        ]
    },
    "test",
)  # fmt: skip


def open_orchestrator(config: Any = CONFIG, init_timeout: float = 120.0) -> Orchestrator:
    return Orchestrator(config, "", shm_threshold_bytes=65536, init_timeout=init_timeout, server=ForkServer())


class Caller:
    """Submits requests and gathers their terminal events."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.events: queue.SimpleQueue[TerminalEvent] = queue.SimpleQueue()
        self.count = 0

    def submit(self, prompt: str, modalities: tuple[str, ...] = ("text", "audio"), **options: Any) -> str:
        self.count += 1
        request_id = f"r{self.count}"
        stage_ids = CONFIG.stages_for(list(modalities))
        stages = {i: StageRequest(request_id=request_id, prompt=prompt, options=options) for i in stage_ids}
        final_stages = [i for i in stage_ids if CONFIG.stages[i].final_output_type in modalities]
        self.orchestrator.submit(PipelineRequest(request_id, stages, final_stages, self.events.put))
        return request_id

    def wait(self, count: int) -> dict[str, TerminalEvent]:
        events = [self.events.get(timeout=60) for _ in range(count)]
        assert len({event.request_id for event in events}) == count
        return {event.request_id: event for event in events}

    def wait_one(self) -> TerminalEvent:
        return self.events.get(timeout=60)


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    orchestrator = open_orchestrator()
    orchestrator.wait_until_started()
    yield orchestrator
    orchestrator.close()


@pytest.fixture
def caller(orchestrator: Orchestrator) -> Caller:
    return Caller(orchestrator)


def texts(event: TerminalEvent) -> list[str]:
    assert event.error is None
    return [output.outputs[0].text for output in event.outputs]


def test_many_requests_keep_their_own_data(caller: Caller) -> None:
    sizes = {caller.submit(f"p{i}", fake_bytes=200_000 if i % 2 else 10): (i, 200_000 if i % 2 else 10)
             for i in range(60)}  # fmt: skip
    for request_id, event in caller.wait(60).items():
        i, size = sizes[request_id]
        assert texts(event) == [f"p{i}>a", f"p{i}>a+p{i}>a>b>c"]
        assert event.outputs[1].multimodal_output["bytes"].tolist() == [2] * size
        assert [metrics.name for metrics in event.outputs[0].stage_metrics] == ["a", "b", "c"]


def test_only_the_stages_that_a_request_needs_run(caller: Caller) -> None:
    caller.submit("p", modalities=("text",))
    event = caller.wait_one()
    assert texts(event) == ["p>a"]
    assert [metrics.name for metrics in event.outputs[0].stage_metrics] == ["a"]
    caller.submit("p", modalities=("audio",))
    assert texts(caller.wait_one()) == ["p>a+p>a>b>c"]


def test_an_error_fails_its_own_request_and_says_where(caller: Caller) -> None:
    bad = caller.submit("bad", fake_fail="b")
    good = caller.submit("good")
    events = caller.wait(2)
    assert texts(events[good]) == ["good>a", "good>a+good>a>b>c"]
    assert events[bad].outputs == []
    error = events[bad].error
    assert isinstance(error, StageExecutionError) and error.recoverable
    assert (error.request_id, error.stage_id) == (bad, 1)
    assert "stage 1 (b): RuntimeError: b was told to fail" in str(error)
    assert "fake.py" in error.stage_traceback


def test_an_abort_ends_a_request_once_and_spares_the_others(caller: Caller) -> None:
    slow = caller.submit("slow", fake_seconds=0.5)
    waiting = caller.submit("waiting", fake_seconds=30.0)
    other = caller.submit("other")
    caller.orchestrator.abort([waiting])
    events = caller.wait(3)
    assert isinstance(events[waiting].error, RequestAbortedError)
    assert texts(events[slow])[0] == "slow>a" and texts(events[other])[0] == "other>a"
    caller.orchestrator.abort([slow, "unknown"])
    caller.submit("after")
    assert texts(caller.wait_one())[0] == "after>a"
    assert caller.events.empty()


def test_nothing_is_left_of_payloads_when_all_is_quiet(caller: Caller, orchestrator: Orchestrator) -> None:
    for _ in range(8):
        caller.submit("p", fake_bytes=300_000)
    caller.submit("p", fake_bytes=300_000, fake_fail="c")
    caller.wait(9)
    assert all(path.suffix == ".sock" for path in orchestrator._run_dir.path.iterdir())


def test_a_dead_stage_fails_what_it_held_and_close_leaves_nothing() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    orchestrator = open_orchestrator()
    orchestrator.wait_until_started()
    caller = Caller(orchestrator)
    caller.submit("p", fake_die="b")
    event = caller.wait_one()
    assert isinstance(event.error, StageDeadError)
    assert "stage 1 (b) died: it was killed by SIGKILL" in str(event.error)
    caller.submit("needs b")
    event = caller.wait_one()
    assert isinstance(event.error, StageDeadError)
    caller.submit("spared", modalities=("text",))
    assert texts(caller.wait_one()) == ["spared>a"]

    running = caller.submit("running", modalities=("text",), fake_seconds=0.3)
    run_dir = orchestrator._run_dir.path
    orchestrator.close()
    orchestrator.close()
    event = caller.wait_one()
    assert event.request_id == running
    assert isinstance(event.error, RequestAbortedError)
    with pytest.raises(PipelineClosedError):
        caller.submit("late")
    assert not run_dir.exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_stage_that_cannot_start_ends_the_start_with_its_own_error() -> None:
    raw = {
        "stage_args": [
            {"stage_id": 0, "engine_type": "fake"},
            {"stage_id": 1, "engine_type": "DiT", "engine_args": {"model_stage": "painter"}, "engine_input_source": [0],
             "final_output": True, "final_output_type": "image"},
        ]
    }  # fmt: skip
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    orchestrator = open_orchestrator(parse_pipeline_config(raw, "test"))
    with pytest.raises(StageStartError, match=r"stage 1 \(painter\) failed to start: StageConfigError") as error:
        orchestrator.wait_until_started()
    assert error.value.stage_id == 1
    orchestrator.close()
    assert not orchestrator._run_dir.path.exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_start_that_takes_too_long_is_ended() -> None:
    orchestrator = open_orchestrator(init_timeout=0.2)
    with pytest.raises(StageStartError, match=r"init_timeout|timed out"):
        orchestrator.wait_until_started()
    assert not orchestrator._run_dir.path.exists()


def test_when_the_parent_is_killed_its_stages_go_too_and_the_next_start_cleans_up() -> None:
    script = textwrap.dedent("""
        import psutil, sys
        from tests.orchestrator.test_orchestrator import open_orchestrator
        orchestrator = open_orchestrator()
        orchestrator.wait_until_started()
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        print(orchestrator._run_dir.path, *pids, flush=True)
        sys.stdin.read()
    """)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        run_dir, *pids = parent.stdout.readline().split()
        children = [psutil.Process(int(pid)) for pid in pids]
        assert len(children) == 4  # three stages and the server that they were forked from
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    assert Path(run_dir).exists()
    RunDir().remove()
    assert not Path(run_dir).exists()
