# SPDX-License-Identifier: Apache-2.0
"""Pipelines with a stage in a Python of its own: what ends it, and what commands say about it."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.orchestrator.pipelines import Caller, fake_stage, function_stage, make_config, open_orchestrator, texts
from tests.orchestrator.test_failure import wait_until
from tests.stage import agent_stages
from vllm_omni import OmniLLM
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.errors import StageConfigError, StageStartError
from vllm_omni.events import ErrorEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.outputs import StageOutput

FIRST = fake_stage(0, "a")


def in_agent(function: Any, stage_id: int = 1, sources: tuple[int, ...] = (0,), **runtime: Any) -> dict[str, Any]:
    stage = function_stage(stage_id, "own", function, sources, "text")
    return stage | {"runtime": {"python": sys.executable} | runtime}


Start = Callable[..., Caller]


@pytest.fixture
def start() -> Iterator[Start]:
    opened: list[Orchestrator] = []

    def start(*stages: dict[str, Any]) -> Caller:
        config: PipelineConfig = make_config(*stages, restart={"backoff_s": 0.01})
        opened.append(open_orchestrator(config))
        opened[-1].wait_until_started()
        return Caller(opened[-1], config)

    yield start
    for orchestrator in opened:
        orchestrator.close()


def write(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """What a later stage reads: the prompt, and numbers."""
    return {"text": request.prompt, "numbers": np.arange(3)}


def where(caller: Caller) -> dict[str, Any]:
    caller.submit("where")
    return caller.wait_one().output.outputs[-1].data


WRITER = function_stage(0, "writer", write)


def test_a_crash_is_named_and_the_stage_restarts(start: Start) -> None:
    caller = start(WRITER, in_agent(agent_stages.Speech))
    caller.submit("abc")
    assert texts(caller.wait_one()) == ["abc<1>"]
    caller.submit("exit")
    event = caller.wait_one()
    assert isinstance(event, ErrorEvent)
    wait_until(lambda: caller.orchestrator.health()[1].num_restarts >= 1)
    death = caller.orchestrator.health()[1].last_death
    assert f"stage 1 (own): its Python, {sys.executable}, exited with status 3; it printed last: it gives up" in death
    caller.submit("abc")
    assert texts(caller.wait_one()) == ["abc<1>"]


def test_a_hang_ends_the_agent_too(start: Start) -> None:
    caller = start(WRITER, in_agent(agent_stages.Speech, step_timeout_s=1.0))
    caller.submit("where")
    before = caller.wait_one()
    hanging = caller.submit("hang")
    wait_until(lambda: caller.orchestrator.health()[1].num_restarts >= 1)
    assert "a step took longer than 1 s" in caller.orchestrator.health()[1].last_death
    caller.orchestrator.abort([hanging])
    caller.wait_one()
    assert before


def test_a_start_that_fails_is_named() -> None:
    config = make_config(FIRST, in_agent(agent_stages.Speech) | {"engine_args": {"model_stage": "own", "fails": True}})
    orchestrator = open_orchestrator(config)
    try:
        with pytest.raises(StageStartError, match="LookupError: no weights here"):
            orchestrator.wait_until_started()
    finally:
        orchestrator.close()
