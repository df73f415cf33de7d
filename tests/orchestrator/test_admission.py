# SPDX-License-Identifier: Apache-2.0
"""The admission queue: its limit, its order, and its errors."""

import threading

import pytest
from vllm.sampling_params import SamplingParams

from tests.clock import Clock
from vllm_omni.errors import PipelineClosedError, PipelineFullError
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator import admission as admission_module
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.request import PipelineRequest


def request(request_id: str, num_sequences: int = 1) -> PipelineRequest:
    params = SamplingParams(n=num_sequences)
    return PipelineRequest(
        request_id=request_id,
        external_id=request_id,
        stages={0: StageRequest(request_id=request_id, sampling_params=params), 1: StageRequest(request_id=request_id)},
        final_stages=[],
        on_event=lambda event: None,
    )


def test_requests_are_taken_in_order() -> None:
    admission = Admission(max_inflight=2, max_queued=2)
    for request_id in "abc":
        admission.put(request(request_id), wait=False)
    assert admission.withdraw("b") is not None and admission.withdraw("b") is None
    first = admission.peek()
    assert first is not None and first.request_id == "a"
    assert admission.withdraw("a") is not None
    first = admission.peek()
    assert first is not None and first.request_id == "c"
    admission.withdraw("c")
    assert admission.peek() is None


def test_a_request_counts_until_its_last_event_was_received() -> None:
    admission = Admission(max_inflight=1, max_queued=1)
    admission.put(request("a"), wait=False)
    admission.put(request("b"), wait=False)
    admission.withdraw("a")
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


def test_closing_returns_waiting_requests_and_refuses_others() -> None:
    admission = Admission(max_inflight=1, max_queued=1)
    admission.put(request("a"), wait=False)
    assert [waiting.request_id for waiting in admission.close()] == ["a"]
    for wait in (True, False):
        with pytest.raises(PipelineClosedError):
            admission.put(request("b"), wait=wait)
    with pytest.raises(PipelineClosedError):
        admission.check_room()


def test_a_request_would_wait_behind_others_and_where_all_run() -> None:
    admission = Admission(max_inflight=2, max_queued=2)
    assert not admission.would_wait() and not admission.would_wait(1) and admission.would_wait(2)
    admission.put(request("a"), wait=False)
    assert admission.would_wait(), "it has not been admitted yet"
    admission.withdraw("a")
    assert not admission.would_wait() and admission.would_wait(1)
    admission.put(request("b"), wait=False)
    admission.withdraw("b")
    assert admission.would_wait()
    admission.release("a")
    assert not admission.would_wait()


def test_waiting_for_room_can_be_cancelled() -> None:
    """The running requests may never end, or be the caller's own."""
    admission = Admission(max_inflight=1, max_queued=0)
    admission.put(request("a"), wait=True)
    cancelled = threading.Event()
    errors: list[Exception] = []

    def put() -> None:
        try:
            admission.put(request("b"), wait=True, cancelled=cancelled)
        except PipelineFullError as error:
            errors.append(error)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    cancelled.set()
    admission.release("b")
    thread.join()
    assert len(errors) == 1
    admission.release("a")
    admission.check_room()


def test_the_retry_time_does_not_count_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(admission_module, "time", clock)
    admission = Admission(max_inflight=1, max_queued=3)
    for _ in range(20):
        clock.now += 3600.0  # Nobody asks for anything.
        admission.put(request("a"), wait=False)
        clock.now += 4.0
        admission.release("a")
    for request_id in "abcd":
        admission.put(request(request_id), wait=False)
    with pytest.raises(PipelineFullError) as full:
        admission.check_room()
    assert 3.0 <= full.value.retry_after_s <= 4.0
    clock.now += 4.0
    admission.release("a")
    admission.put(request("a"), wait=False)
    clock.now += 4.0
    admission.release("b")
    admission.put(request("b"), wait=False)
    with pytest.raises(PipelineFullError) as full:
        admission.check_room()
    assert 3.0 <= full.value.retry_after_s <= 4.0


def test_requests_in_preparation_count() -> None:
    admission = Admission(max_inflight=2, max_queued=1)
    admission.put(request("a"), wait=False)
    admission.check_room(num_coming=1)
    with pytest.raises(PipelineFullError, match="3 requests"):
        admission.check_room(num_coming=2)


def test_each_sequence_counts() -> None:
    admission = Admission(max_inflight=2, max_queued=2)
    admission.put(request("a", 3), wait=False)
    with pytest.raises(PipelineFullError, match="3 requests"):
        admission.put(request("b", 2), wait=False)
    admission.check_room(num_sequences=1)
    admission.put(request("c"), wait=False)
    with pytest.raises(PipelineFullError):
        admission.check_room()
    admission.release("a")
    admission.put(request("b", 2), wait=False)


def test_a_request_with_more_sequences_than_fit_is_admitted_alone() -> None:
    admission = Admission(max_inflight=1, max_queued=1)
    admission.put(request("a"), wait=False)
    with pytest.raises(PipelineFullError):
        admission.put(request("b", 100), wait=False)
    admission.release("a")
    admission.put(request("b", 100), wait=False)
    with pytest.raises(PipelineFullError):
        admission.check_room()
    admission.release("b")
    admission.check_room()
