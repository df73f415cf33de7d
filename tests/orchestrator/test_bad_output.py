# SPDX-License-Identifier: Apache-2.0
"""Outputs and inputs that cannot be serialized fail only their own request."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.orchestrator.pipelines import (
    Caller,
    error_of,
    fake_stage,
    function_stage,
    make_config,
    opened,
    state_of,
    texts,
)
from vllm_omni.errors import StageExecutionError
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput


def speak(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """A stage function whose output the prompt selects."""
    values: dict[str, Any] = {"text": request.prompt}
    match request.prompt:
        case "object":
            values["thing"] = object()
        case "scalar":
            values["audio"] = torch.tensor(1.0)
        case "scalar piece":
            return iter([values | {"audio": torch.tensor(1.0)}])
        case "shapes":
            return iter([{"wave": torch.zeros(2, 3)}, {"wave": torch.zeros(2, 4)}])
    return values


STAGES = (function_stage(0, "maker", speak, (), "text"), fake_stage(1, "reader", (0,), "audio"))


@pytest.fixture(scope="module", params=[-1, 1], ids=["whole", "windows"])
def caller(request: pytest.FixtureRequest) -> Iterator[Caller]:
    edges = [{"from": 0, "to": 1, "window_size": request.param, "unit": "wave"}]
    config = make_config(*STAGES, edges=edges, defaults={"max_queued": 2})
    with opened(config) as caller:
        yield caller


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("what", "reason"), [("object", "object"), ("shapes", "differ in shape")])
def test_an_output_that_cannot_be_sent_fails_its_request(what: str, reason: str, streams: bool, caller: Caller) -> None:
    for _ in range(5):  # more than may wait: the reader's credit comes back
        caller.submit(what, streams=streams)
        while not (event := caller.next()).is_terminal:
            pass
        error = error_of(event)
        assert isinstance(error, StageExecutionError) and reason in str(error)
        caller.submit("next")
        assert texts(caller.wait_one()) == ["next", "next>reader"]
    assert state_of(caller.orchestrator) == {"maker": "ready", "reader": "ready"}
    assert [stage.num_restarts for stage in caller.orchestrator.health()] == [0, 0]


def test_a_request_that_cannot_be_serialized_fails_alone(caller: Caller) -> None:
    caller.submit("p", option=object())
    error = error_of(caller.wait_one())
    assert isinstance(error, StageExecutionError) and "object" in str(error)
    caller.submit("next")
    assert texts(caller.wait_one()) == ["next", "next>reader"]


def test_audio_of_one_sample_without_a_dimension() -> None:
    config = make_config(function_stage(0, "maker", speak, (), "audio") | {"sample_rate": 10})
    with opened(config) as caller:
        for what in ("scalar", "scalar piece"):
            caller.submit(what)
            assert texts(caller.wait_one()) == [what]
