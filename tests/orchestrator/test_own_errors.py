# SPDX-License-Identifier: Apache-2.0
"""Errors of the orchestrator's own thread: each request still has its terminal event, and health says what is true."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.orchestrator.pipelines import (
    FAR,
    Caller,
    error_of,
    fake_stage,
    function_stage,
    make_config,
    opened,
    state_of,
    texts,
)
from tests.orchestrator.test_failure import wait_until
from vllm_omni.errors import PipelineClosedError, RequestAbortedError, StageExecutionError
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator import request as request_module
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.outputs import StageOutput

RATE = 100


def stream(request: StageRequest, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
    """A stage function whose prompt has the shapes of its pieces, e.g. `2x300 2x200`."""
    for shape in (request.prompt or "").split():
        yield {"audio": torch.ones([int(size) for size in shape.split("x") if size])}


@pytest.fixture(scope="module")
def speaker() -> Iterator[Caller]:
    config = make_config(function_stage(0, "speaker", stream, (), "audio") | {"sample_rate": RATE})
    with opened(config) as caller:
        yield caller


def end_of(caller: Caller, prompt: str, streams: bool) -> Any:
    caller.submit(prompt, streams=streams)
    return caller.wait_one()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("prompt", "shape"),
    [("2x300 2x200", [2, 500]), ("300 200", [500]), ("1x2x3 1x2x4", [1, 2, 7])],
)
def test_audio_is_joined_along_time(speaker: Caller, prompt: str, shape: list[int], streams: bool) -> None:
    end = end_of(speaker, prompt, streams)
    assert isinstance(end, CompletedEvent), end
    assert list(end.outputs[0].multimodal_output["audio"].shape) == shape


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("prompt", ["2x300 1x300", "2x300 300", "300 x", "x 300"])
def test_pieces_that_cannot_be_joined_fail_their_request_at_once(speaker: Caller, prompt: str, streams: bool) -> None:
    error = error_of(end_of(speaker, prompt, streams))
    assert isinstance(error, StageExecutionError) and "pieces of 'audio' differ in shape" in str(error)
    assert isinstance(end_of(speaker, "2x3 2x4", streams), CompletedEvent)
    assert state_of(speaker.orchestrator) == {"speaker": "ready"}


@pytest.fixture
def caller() -> Iterator[Caller]:
    config = make_config(fake_stage(0, "a", (), "text"), max_inflight=2)
    with opened(config) as caller:
        yield caller


@pytest.mark.parametrize("what", ["merge_stage_outputs", "OmniRequestOutput", "CompletedEvent", "RequestSummary"])
def test_an_end_that_cannot_be_made_fails_one_request(
    caller: Caller, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(request_module, what)
    calls: list[int] = []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("it cannot be made")
        return original(*args, **kwargs)

    monkeypatch.setattr(request_module, what, fail_once)
    caller.submit("p")
    error = error_of(caller.wait_one())
    assert isinstance(error, StageExecutionError) and "it cannot be made" in str(error)
    caller.submit("next")
    assert texts(caller.wait_one()) == ["next>a"]


class Broken:
    """A receiver of events."""

    def put(self, event: Any) -> None:
        raise RuntimeError("the receiver is broken")


def test_a_receiver_that_raises_ends_no_other_request(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(caller, "events", Broken())
        held = caller.submit("p", fake_seconds=FAR)
        caller.submit("p", streams=True)
    caller.orchestrator.abort([held])
    caller.submit("next")
    assert texts(caller.wait_one()) == ["next>a"]


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("on_texts", {"fake_tokens": 3}),
        ("on_result", {}),
        ("on_error", {"fake_fail": "a"}),
        ("on_output", {"fake_steps": 2}),
    ],
)
def test_a_message_that_cannot_be_handled_fails_its_request(
    where: str, options: dict[str, Any], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(*args: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(caller.orchestrator._router, where, fail_once)
    caller.submit("p", streams=True, **options)
    while not (event := caller.next()).is_terminal:
        pass
    assert "RuntimeError: a defect" in str(error_of(event))
    caller.submit("next")
    assert texts(caller.wait_one()) == ["next>a"]


def fail(orchestrator: Orchestrator) -> None:
    def command() -> None:
        raise RuntimeError("a defect")

    orchestrator._command(command)


def test_if_the_thread_ends_every_request_does(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    orchestrator = caller.orchestrator
    ids = {caller.submit(f"p{i}", fake_seconds=FAR, streams=True) for i in range(4)}  # Two of them wait for admission.
    wait_until(lambda: orchestrator.activity()["a"] == 2)
    assert orchestrator.is_running and state_of(orchestrator) == {"a": "ready"}
    fail(orchestrator)
    ends = caller.wait(4)
    assert set(ends) == ids
    for end in ends.values():
        assert isinstance(error_of(end), RequestAbortedError) and "an internal error" in str(error_of(end))
    assert not orchestrator.is_running and state_of(orchestrator) == {"a": "dead"}
    assert "an internal error" in orchestrator.health()[0].last_death
    for refused in (lambda: caller.submit("next"), orchestrator.check_room, orchestrator.stats):
        with pytest.raises(PipelineClosedError, match=r"an internal error .* make a new one"):
            refused()
    orchestrator._thread.join()
    assert str(orchestrator.error) == "a defect" and "a defect" in caplog.text


def test_one_request_that_cannot_be_ended_does_not_keep_the_others(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver has its event, whatever else fails."""
    for i in range(4):
        caller.submit(f"p{i}", fake_seconds=FAR)
    wait_until(lambda: caller.orchestrator.activity()["a"] == 2)

    def fail_to_send(request_ids: list[str]) -> None:
        raise RuntimeError("a socket is broken")

    monkeypatch.setattr(caller.orchestrator._stages[0], "abort", fail_to_send)
    fail(caller.orchestrator)
    assert len(caller.wait(4)) == 4


def test_a_request_that_cannot_be_started_fails_alone(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = caller.orchestrator._router._replicas[0]

    def fail_once(*args: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(replicas, "select", fail_once)
    caller.submit("p")
    assert "could not be started: RuntimeError: a defect" in str(error_of(caller.wait_one()))
    caller.submit("next", streams=True)
    events = caller.events_of("r2")
    assert isinstance(events[0], ARSegmentEvent) and texts(events[-1]) == ["next>a"]


def test_a_closed_pipeline_is_not_healthy() -> None:
    with opened(make_config(fake_stage(0, "a", (), "text"))) as caller:
        orchestrator = caller.orchestrator
    assert not orchestrator.is_running and state_of(orchestrator) == {"a": "dead"} and orchestrator.error is None
