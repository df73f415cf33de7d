# SPDX-License-Identifier: Apache-2.0
"""Stage processes: bound to cores, failing."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
from vllm_omni.errors import StageCrashError, StageStartError
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.outputs import StageOutput
from vllm_omni.placement.cores import place_cores
from vllm_omni.stage import worker
from vllm_omni.stage.engines.base import Outbox


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
        opened.append(open_orchestrator(config, placements=place_cores(config, "none")))
        opened[-1].wait_until_started()
        return opened[-1], Caller(opened[-1], config)

    yield start
    for orchestrator in opened:
        orchestrator.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_processes_and_cores_are_as_configured(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    stages = {
        "a": {"cpus": str(first)},
        "b": {"cpus": str(last)},
        "c": {"cpus": f"{first},{last}"},
    }
    config = make_config(
        *(
            function_stage(i, name, describe_process, (), f"text{i}") | {"runtime": runtime}
            for i, (name, runtime) in enumerate(stages.items())
        )
    )
    _, caller = start(config)
    caller.submit("where?")
    a, b, c = (json.loads(text) for text in texts(caller.wait_one()))
    assert len({a["pid"], b["pid"], c["pid"]}) == 3
    assert (a["title"], a["is_main_thread"]) == ("vllm_omni::a", True)
    assert (a["cpus"], b["cpus"]) == (str(first), str(last))
    # Every thread of the process, including the IO thread.
    assert (a["threads_on"], b["threads_on"]) == ([[first]], [[last]])
    assert (a["num_threads"], b["num_threads"], c["num_threads"]) == (1, 1, len({first, last}))


@pytest.mark.slow
def test_an_engine_that_ends_has_its_error_reported_and_affects_no_other_stage(start: Open) -> None:
    a, b, c = TRIANGLE
    ending = function_stage(3, "ending", end_engine, (0,), "nothing")
    orchestrator, caller = start(make_config(a, b, c, ending, restart={"backoff_s": 0.01}))
    caller.submit("p", ("nothing",))
    error = error_of(caller.wait_one())
    assert isinstance(error, StageCrashError)
    assert "stage 3 (ending)" in str(error) and "SystemExit: not caught" in str(error)
    again = caller.submit("again", ("text", "audio"))
    assert texts(caller.wait(1)[again]) == ["again>a", "again>a+again>a>b>c"]
    # The request ends the process twice: it is tried once more, alone.
    assert [stage.num_restarts for stage in orchestrator.health()] == [0, 0, 0, 2]


@pytest.mark.slow
def test_the_error_names_the_stage_that_cannot_start(start: Open) -> None:
    missing = fake_stage(1, "painter", output="image") | {"engine_type": "DiT"}
    missing["engine_args"] |= {"model": "no/checkpoint"}
    with pytest.raises(StageStartError, match=r"stage 1 \(painter\).*StageConfigError: no/checkpoint"):
        start(make_config(fake_stage(0, "a"), missing))


@pytest.mark.parametrize("compiles", [True, False])
def test_a_stage_that_compiles_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    lines: list[str] = []
    monkeypatch.setattr(worker, "alone_on_devices", lambda *args: nullcontext())
    monkeypatch.setattr(worker.logger, "info", lambda message, *args: lines.append(message % args))
    engine = SimpleNamespace(compiles_at_start=lambda: compiles, start=lambda: lines.append("started"))
    spec = SimpleNamespace(run_dir="", stage=None)
    stage = SimpleNamespace(
        engine=engine, label="stage 0 (llm)", spec=spec, _outbox=Outbox(), _update_weights=lambda: None
    )
    worker.HostedStage.start(cast(worker.HostedStage, stage))
    line = "stage 0 (llm): compiles its model, for minutes on a machine's first start"
    assert lines == ([line, "started"] if compiles else ["started"])
