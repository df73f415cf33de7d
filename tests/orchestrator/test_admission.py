# SPDX-License-Identifier: Apache-2.0
"""The line before a pipeline: its limit, its order, and what it says to those whom it refuses."""

import threading

import pytest

from vllm_omni.errors import PipelineClosedError, PipelineFullError
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.request import PipelineRequest


def request(request_id: str) -> PipelineRequest:
    return PipelineRequest(
        request_id=request_id, external_id=request_id, stages={}, final_stages=[], on_event=lambda event: None
    )


def test_requests_leave_in_the_order_in_which_they_came() -> None:
    admission = Admission(max_inflight=2, max_queued=2)
    for request_id in "abc":
        admission.put(request(request_id), wait=False)
    assert admission.withdraw("b") is not None and admission.withdraw("b") is None
    first = admission.peek()
    assert first is not None and first.request_id == "a"
    assert [admission.take().request_id for _ in range(2)] == ["a", "c"]
    assert admission.peek() is None


def test_a_place_is_taken_until_the_last_event_is() -> None:
    admission = Admission(max_inflight=1, max_queued=1)
    admission.put(request("a"), wait=False)
    admission.put(request("b"), wait=False)
    admission.take()
    with pytest.raises(PipelineFullError) as full:
        admission.put(request("c"), wait=False)
    with pytest.raises(PipelineFullError):
        admission.check_room()
    assert 1 <= full.value.retry_after_s <= 60
    admission.release("unknown")
    with pytest.raises(PipelineFullError):
        admission.check_room()
    admission.release("a")
    admission.release("a")
    admission.put(request("c"), wait=False)
    with pytest.raises(PipelineFullError):
        admission.check_room()


def test_a_closed_line_gives_back_who_waits_and_lets_nobody_in() -> None:
    admission = Admission(max_inflight=1, max_queued=1)
    admission.put(request("a"), wait=False)
    assert [waiting.request_id for waiting in admission.close()] == ["a"]
    for wait in (True, False):
        with pytest.raises(PipelineClosedError):
            admission.put(request("b"), wait=wait)
    with pytest.raises(PipelineClosedError):
        admission.check_room()


def test_who_waits_for_room_can_give_up() -> None:
    """What takes the room may be for ever, or the caller's own."""
    admission = Admission(max_inflight=1, max_queued=0)
    admission.put(request("a"), wait=True)
    cancelled = threading.Event()
    errors: list[Exception] = []

    def put() -> None:
        try:
            admission.put(request("b"), wait=True, cancelled=cancelled)
        except PipelineFullError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    cancelled.set()
    admission.release("b")
    thread.join(10)
    assert not thread.is_alive() and len(errors) == 1
    admission.release("a")
    admission.check_room()


def test_those_that_are_on_their_way_take_room_too() -> None:
    admission = Admission(max_inflight=2, max_queued=1)
    admission.put(request("a"), wait=False)
    admission.check_room(num_coming=1)
    with pytest.raises(PipelineFullError, match="3 requests"):
        admission.check_room(num_coming=2)
