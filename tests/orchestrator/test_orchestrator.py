# SPDX-License-Identifier: Apache-2.0
"""A pipeline of fake stages, each a real process: routing, failure, and cleanup."""

import contextlib
import os
import re
import signal
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forked_programs import ForkedProgram, QuickForkServer
from tests.orchestrator.pipelines import FAR, TRIANGLE, Caller, error_of, make_config, open_orchestrator, texts
from tests.orchestrator.test_failure import wait_until
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.distributed import run_dir as run_dirs
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.errors import (
    PipelineClosedError,
    RequestAbortedError,
    StageExecutionError,
    StageStartError,
)
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.orchestrator.orchestrator import Orchestrator

CONFIG = make_config(*TRIANGLE)


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    orchestrator = open_orchestrator(CONFIG)
    orchestrator.wait_until_started()
    yield orchestrator
    orchestrator.close()


@pytest.fixture
def caller(orchestrator: Orchestrator) -> Caller:
    return Caller(orchestrator, CONFIG)


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


def test_an_error_fails_its_own_request_and_names_the_stage(caller: Caller) -> None:
    bad = caller.submit("bad", fake_fail="b")
    good = caller.submit("good")
    events = caller.wait(2)
    assert texts(events[good]) == ["good>a", "good>a+good>a>b>c"]
    error = error_of(events[bad])
    assert isinstance(error, StageExecutionError) and error.recoverable
    assert (error.request_id, error.stage_id) == (bad, 1)
    assert "stage 1 (b): RuntimeError: b fails (fake_fail)" in str(error)
    assert "fake.py" in error.stage_traceback


def test_an_abort_ends_one_request_once(caller: Caller) -> None:
    slow = caller.submit("slow", fake_seconds=0.5)
    waiting = caller.submit("waiting", fake_seconds=FAR)
    other = caller.submit("other")
    caller.orchestrator.abort([waiting])
    events = caller.wait(3)
    assert isinstance(error_of(events[waiting]), RequestAbortedError)
    assert texts(events[slow])[0] == "slow>a" and texts(events[other])[0] == "other>a"
    caller.orchestrator.abort([slow, "unknown"])
    caller.submit("after")
    assert texts(caller.wait_one())[0] == "after>a"
    assert caller.events.empty()


def test_no_payloads_remain_when_the_pipeline_is_idle(caller: Caller, orchestrator: Orchestrator) -> None:
    for _ in range(8):
        caller.submit("p", fake_bytes=300_000)
    caller.submit("p", fake_bytes=300_000, fake_fail="c")
    caller.wait(9)

    def left() -> list[str]:
        names = [path.name for path in orchestrator._run_dir.path.iterdir()]
        return [name for name in names if not name.endswith(".sock") and not name.startswith("pool-")]

    wait_until(lambda: left() == [], lambda: str(left()))  # what was sent for the failed request is to be dropped


def test_close_ends_running_requests_and_leaves_nothing() -> None:
    server = QuickForkServer()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    orchestrator = open_orchestrator(CONFIG, server=server)
    orchestrator.wait_until_started()
    caller = Caller(orchestrator, CONFIG)
    running = caller.submit("running", fake_seconds=FAR)
    run_dir = orchestrator._run_dir.path
    orchestrator.close()
    orchestrator.close()
    event = caller.wait_one()
    assert event.request_id == running
    assert isinstance(error_of(event), RequestAbortedError)
    with pytest.raises(PipelineClosedError):
        caller.submit("late")
    assert not run_dir.exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_stage_that_cannot_start_fails_the_start_with_its_error() -> None:
    raw = {
        "stage_args": [
            {"stage_id": 0, "engine_type": "fake"},
            {"stage_id": 1, "engine_type": "DiT", "engine_args": {"model_stage": "painter", "model": "no/checkpoint"},
             "final_output": True, "final_output_type": "image"},
        ]
    }  # fmt: skip
    server = QuickForkServer()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    orchestrator = open_orchestrator(parse_pipeline_config(raw, "test"), server=server)
    with pytest.raises(StageStartError, match=r"stage 1 \(painter\) failed to start: StageConfigError") as error:
        orchestrator.wait_until_started()
    assert error.value.stage_id == 1
    orchestrator.close()
    assert not orchestrator._run_dir.path.exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_pipeline_can_be_closed_while_it_starts() -> None:
    with contextlib.closing(QuickForkServer()) as server:
        os.kill(server._process.pid, signal.SIGSTOP)
        orchestrator = open_orchestrator(CONFIG, server=server)
        orchestrator.close()
    with pytest.raises(PipelineClosedError, match="while it started"):
        orchestrator.wait_until_started()
    assert not orchestrator._run_dir.path.exists()


@pytest.mark.slow
def test_a_start_that_takes_too_long_fails() -> None:
    orchestrator = open_orchestrator(CONFIG, init_timeout=0.2, server=ForkServer())
    with pytest.raises(StageStartError, match=r"init_timeout|timed out"):
        orchestrator.wait_until_started()
    assert not orchestrator._run_dir.path.exists()


@pytest.mark.slow
def test_stages_end_with_a_killed_parent_and_the_next_start_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(
        textwrap.dedent("""
        import pathlib, psutil, signal, sys
        from tests.orchestrator.test_orchestrator import CONFIG, ForkServer, open_orchestrator, run_dirs
        run_dirs.MEMORY_FILE_SYSTEM = pathlib.Path(sys.argv[1])
        orchestrator = open_orchestrator(CONFIG, server=ForkServer(from_this_process=True))
        orchestrator.wait_until_started()
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        print("started", orchestrator._run_dir.path, *pids, "with pids", flush=True)
        signal.pause()
    """)
    )
    # Any pipeline of the machine removes what killed ones have left in the directory that they share.
    with tempfile.TemporaryDirectory() as memory:
        parent = ForkedProgram(program, [memory], output)
        wait_until(lambda: "with pids" in output.read_text() or parent.poll() is not None)
        run_dir, *pids = re.findall("started (.*) with pids", output.read_text())[0].split()
        children = [psutil.Process(int(pid)) for pid in pids]
        assert len(children) == 4  # three stages and the server that they were forked from
        parent.kill()
        for child in children:
            child.wait()
        assert Path(run_dir).parent == Path(memory) and Path(run_dir).exists()
        monkeypatch.setattr(run_dirs, "MEMORY_FILE_SYSTEM", Path(memory))
        RunDir().remove()
        assert not Path(run_dir).exists()
