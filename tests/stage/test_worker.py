# SPDX-License-Identifier: Apache-2.0
"""Stage processes: with one stage, with several, bound to cores, failing."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.orchestrator.pipelines import (
    TRIANGLE,
    Caller,
    error_of,
    fake_stage,
    function_stage,
    kept_server,
    make_config,
    open_orchestrator,
    texts,
)
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.errors import RequestAbortedError, StageCrashError, StageStartError
from vllm_omni.events import CompletedEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.outputs import StageOutput
from vllm_omni.placement.cores import place_cores


def describe_process(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function: describes its process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    facts = {
        "pid": os.getpid(),
        "is_main_thread": threading.current_thread() is threading.main_thread(),
        "cpus": status["Cpus_allowed_list"].strip(),
        "threads_on": sorted(cores_of_threads()),
        "num_threads": torch.get_num_threads(),
        "title": Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(),
    }
    return {"text": json.dumps(facts)}


def cores_of_threads() -> set[tuple[int, ...]]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # It has just ended.
            found.add(tuple(os.sched_getaffinity(int(task))))
    return found


def end_engine(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function that ends its engine; an `Exception` would only fail its request."""
    raise SystemExit("not caught")


Open = Callable[[PipelineConfig], tuple[Orchestrator, Caller]]


@pytest.fixture(scope="module")
def start() -> Iterator[Open]:
    """Opens pipelines and closes them; then no process of theirs may be left."""
    kept_server()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    opened: list[Orchestrator] = []

    def start(config: PipelineConfig) -> tuple[Orchestrator, Caller]:
        opened.append(open_orchestrator(config, placements=place_cores(config)))
        opened[-1].wait_until_started()
        return opened[-1], Caller(opened[-1], config)

    yield start
    for orchestrator in opened:
        orchestrator.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def in_process(name: str | bool, *stages: dict[str, Any]) -> list[dict[str, Any]]:
    return [stage | {"runtime": {**stage["runtime"], "process": name}} for stage in stages]


@pytest.fixture(scope="module")
def together(start: Open) -> Caller:
    """The triangle in one process."""
    config = make_config(*in_process(False, *TRIANGLE))
    assert len(config.processes) == 1
    return start(config)[1]


def test_processes_and_cores_are_as_configured(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    stages = {
        "a": {"process": "x"},
        "b": {"cpus": str(first)},
        "c": {"process": "x", "cpus": str(last)},
        "d": {"cpus": f"{first},{last}"},
    }
    config = make_config(
        *(
            function_stage(i, name, describe_process, (), f"text{i}") | {"runtime": runtime}
            for i, (name, runtime) in enumerate(stages.items())
        )
    )
    _, caller = start(config)
    caller.submit("where?")
    a, b, c, d = (json.loads(text) for text in texts(caller.wait_one()))
    assert a["pid"] == c["pid"] and len({a["pid"], b["pid"], d["pid"]}) == 3
    assert (a["title"], b["title"]) == ("vllm_omni::a+c", "vllm_omni::b")
    assert (a["is_main_thread"], b["is_main_thread"], c["is_main_thread"]) == (False, True, False)
    assert (a["cpus"], b["cpus"], c["cpus"]) == (str(last), str(first), str(last))
    # Every thread of the process, including the IO threads.
    assert (a["threads_on"], b["threads_on"]) == ([[last]], [[first]])
    assert (a["num_threads"], b["num_threads"], d["num_threads"]) == (1, 1, len({first, last}))


def test_one_process_has_the_same_results_as_three(together: Caller) -> None:
    """Concurrent requests, with payloads inline and through shared memory."""
    sizes = [10 if i % 2 else 200_000 for i in range(20)]
    ids = [together.submit(f"p{i}", fake_bytes=size) for i, size in enumerate(sizes)]
    ends = together.wait(len(ids))
    for i, (request_id, size) in enumerate(zip(ids, sizes, strict=True)):
        end = ends[request_id]
        assert texts(end) == [f"p{i}>a", f"p{i}>a+p{i}>a>b>c"]
        assert isinstance(end, CompletedEvent)
        assert end.outputs[1].multimodal_output["bytes"].tolist() == [2] * size


def test_an_abort_and_an_error_affect_only_their_request(together: Caller) -> None:
    slow = together.submit("slow", fake_seconds=30.0, fake_only="b")
    bad = together.submit("bad", fake_fail="a")
    assert "stage 0 (a): RuntimeError: a fails (fake_fail)" in str(error_of(together.wait(1)[bad]))
    together.orchestrator.abort([slow])
    assert isinstance(error_of(together.wait(1)[slow]), RequestAbortedError)
    good = together.submit("good")
    assert texts(together.wait(1)[good]) == ["good>a", "good>a+good>a>b>c"]


@pytest.mark.slow
def test_the_end_of_a_process_affects_only_its_stages(start: Open) -> None:
    a, b, c = TRIANGLE
    ending = function_stage(3, "ending", end_engine, (0,), "nothing")
    orchestrator, caller = start(make_config(*in_process("x", a, b, ending), c, restart={"backoff_s": 0.01}))
    wanted = ("text", "audio")
    caller.submit("p", wanted, fake_die="b")
    error = error_of(caller.wait_one())
    assert isinstance(error, StageCrashError) and "SIGKILL" in str(error)
    again = caller.submit("again", wanted)  # all stages of the process restart
    assert texts(caller.wait(1)[again]) == ["again>a", "again>a+again>a>b>c"]

    # An engine that breaks in its thread ends the process, and its error reaches the caller.
    caller.submit("p", ("nothing",))
    error = error_of(caller.wait_one())
    assert isinstance(error, StageCrashError)
    assert "stage 3 (ending): SystemExit: not caught" in str(error)
    again = caller.submit("again", wanted)
    assert texts(caller.wait(1)[again]) == ["again>a", "again>a+again>a>b>c"]
    # Each request ends the process twice: it is tried once more, alone.
    assert [stage.num_restarts for stage in orchestrator.health()] == [4, 4, 0, 4]


@pytest.mark.slow
def test_the_error_names_the_stage_that_cannot_start(start: Open) -> None:
    missing = fake_stage(1, "painter", output="image") | {"engine_type": "DiT"}
    missing["engine_args"] |= {"model": "no/checkpoint"}
    with pytest.raises(StageStartError, match=r"stage 1 \(painter\): StageConfigError: no/checkpoint"):
        start(make_config(*in_process("x", fake_stage(0, "a"), missing)))
