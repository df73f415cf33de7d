# SPDX-License-Identifier: Apache-2.0
"""Pipelines with a stage in a Python of its own: what ends it, and versions that differ."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.orchestrator.pipelines import (
    Caller,
    error_of,
    function_stage,
    make_config,
    open_orchestrator,
    texts,
)
from tests.orchestrator.test_failure import is_ready, processes, restarts_of, running, wait_until
from tests.stage import agent_stages
from vllm_omni.errors import StageCrashError, StageStartError
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines import agent_program


def write(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    return {"text": request.prompt, "numbers": [1, 2], "numpy": np.__version__}


WRITER = function_stage(0, "writer", write)


def in_agent(**runtime: Any) -> dict[str, Any]:
    stage = function_stage(1, "own", agent_stages.Speech, (0,), "text")
    return stage | {"runtime": {"python": sys.executable} | runtime}


def answer(caller: Caller, prompt: str) -> str:
    caller.submit(prompt)
    (text,) = texts(caller.wait_one())
    return text.partition("<")[0]


def has_ended(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def test_a_crash_is_named_and_the_stage_restarts() -> None:
    with running(WRITER, in_agent()) as caller:
        caller.submit("exit")
        error = error_of(caller.wait_one())
        words = f"stage 1 (own): its Python, {sys.executable}, exited with status 3; it printed last: it gives up"
        assert isinstance(error, StageCrashError) and words in str(error)
        assert answer(caller, "abc") == "abc"
        process = int(answer(caller, "process"))
        before = restarts_of(caller, "own")
        os.kill(process, signal.SIGKILL)  # while it is idle
        wait_until(lambda: restarts_of(caller, "own") > before and is_ready(caller))
        assert "was killed by SIGKILL" in caller.orchestrator.health()[1].last_death
        assert answer(caller, "abc") == "abc"
        process = int(answer(caller, "process"))
        os.kill(processes(caller)["own"], signal.SIGKILL)
        wait_until(lambda: has_ended(process))
        assert answer(caller, "abc") == "abc"


def test_the_agent_ends_with_a_stage_that_hangs() -> None:
    with running(WRITER, in_agent(step_timeout_s=1.0)) as caller:  # The first step, which has more time, is over.
        children = psutil.Process(processes(caller)["own"]).children()
        (agent,) = [child for child in children if agent_program.__file__ in child.cmdline()]
        hanging = caller.submit("hang")
        wait_until(lambda: has_ended(agent.pid))
        wait_until(lambda: "took longer than 1 s" in caller.orchestrator.health()[1].last_death)
        caller.orchestrator.abort([hanging])  # It is tried again: the first step of the next process has more time.
        caller.wait_one()


def test_the_agent_ends_with_the_pipeline() -> None:
    with running(WRITER, in_agent()) as caller:
        process = int(answer(caller, "process"))
    wait_until(lambda: has_ended(process))


def test_a_start_that_fails_is_named() -> None:
    broken = in_agent() | {"engine_args": {"model_stage": "own", "fails": True}}
    orchestrator = open_orchestrator(make_config(WRITER, broken))
    try:
        with pytest.raises(StageStartError, match="LookupError: no weights here"):
            orchestrator.wait_until_started()
    finally:
        orchestrator.close()


@pytest.mark.slow
def test_another_numpy_in_one_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stage = in_agent(python=None, packages=["numpy==1.26.4"])
    with running(WRITER, stage) as caller:
        assert answer(caller, "numpy") == "1.26.4 [1, 2]" and np.__version__ != "1.26.4"
        assert answer(caller, "abc") == "abc"
