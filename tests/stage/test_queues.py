# SPDX-License-Identifier: Apache-2.0
"""Which request is next: at a cost that does not depend on their number, and never one that has ended."""

from collections.abc import Sequence

import pytest

from vllm_omni.config.stage_config import SegmentConfig
from vllm_omni.distributed.messages import InlineRef, SubmitMessage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.queues import FlushTimes, WaitingQueue
from vllm_omni.stage.request_state import InputStreams, RequestState
from vllm_omni.stage.segments import CallerReader, Segmenter

INTERVAL = 10.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingSegmenter(Segmenter):
    """Counts the reads of `due`."""

    num_reads = 0

    @property
    def due(self) -> float | None:
        CountingSegmenter.num_reads += 1
        return super().due


def make_state(request_id: str, clock: Clock, targets: Sequence[int] = (), arrival: float = 0.0) -> RequestState:
    config = SegmentConfig(max_segment_tokens=3, min_flush_interval_ms=INTERVAL * 1000 / 2)
    submit = SubmitMessage(
        request_id=request_id,
        number=1,
        sources=[],
        targets=list(targets),
        is_final=True,
        streams=True,
        payload=InlineRef(sizes=[]),
    )
    return RequestState(
        submit=submit,
        request=StageRequest(request_id=request_id),
        inputs=InputStreams({}),
        outputs=CountingSegmenter([CallerReader(config, clock)], clock),
        metrics=StageMetrics(stage_id=0, name="a", arrival=arrival),
    )


class Stage:
    """Requests that write tokens, and the times at which their output is sent."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.requests: dict[str, RequestState] = {}
        self.times = FlushTimes(self.requests)

    def write(self, request_id: str, num_tokens: int = 1) -> StageOutput | None:
        state = self.requests.get(request_id) or make_state(request_id, self.clock)
        self.requests[request_id] = state
        tokens = Completion(token_ids=[0] * num_tokens)
        segment = state.outputs.add(StageOutput(request_id=request_id, stage_id=0, completions=[tokens]))
        self.times.add(state)
        return segment

    def flush(self) -> list[str]:
        """The requests whose output is due now."""
        sent = []
        for state in self.times.take_due(self.clock.now):
            assert state.outputs.flush_if_due() is not None
            sent.append(state.request_id)
        return sent


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_each_request_has_its_own_flush_time(stage: Stage) -> None:
    for request_id in "abc":
        stage.write(request_id)  # the first token is sent at once
        stage.clock.now += 1
    for request_id in "cab":
        assert stage.write(request_id) is None
    assert stage.times.due == 100 + INTERVAL
    assert stage.flush() == []
    stage.clock.now = 101 + INTERVAL
    assert stage.flush() == ["a", "b"]
    assert stage.times.due == 102 + INTERVAL
    stage.clock.now += 1
    assert stage.flush() == ["c"] and stage.times.due is None


def test_output_that_was_sent_early_is_due_later(stage: Stage) -> None:
    stage.write("a")
    stage.write("a")
    stage.clock.now += 4
    assert stage.write("a", 2) is not None, "three tokens are enough"
    assert stage.times.due is None, "nothing is held, so nothing wakes the thread"
    stage.write("a")
    assert stage.times.due == 104 + INTERVAL
    stage.clock.now = 100 + INTERVAL
    assert stage.flush() == []


def test_a_request_that_has_ended_sends_nothing(stage: Stage) -> None:
    for request_id in "ab":
        stage.write(request_id)
        stage.write(request_id)
        stage.clock.now += 1
    del stage.requests["a"]
    assert stage.times.due == 101 + INTERVAL
    stage.clock.now += INTERVAL
    assert stage.flush() == ["b"]


def reads_at_a_wake_up(num_requests: int) -> int:
    stage = Stage()
    for _ in range(2):
        for number in range(num_requests):
            stage.write(str(number))
    CountingSegmenter.num_reads = 0
    assert stage.times.due == 100 + INTERVAL and stage.flush() == []
    return CountingSegmenter.num_reads


def test_the_cost_of_a_wake_up_does_not_depend_on_the_number_of_requests() -> None:
    assert reads_at_a_wake_up(500) == reads_at_a_wake_up(1) > 0


def test_a_request_that_waits_for_a_full_target_does_not_block_later_ones() -> None:
    full: set[int] = {2}
    checks: list[Sequence[int]] = []

    def has_room(targets: Sequence[int]) -> bool:
        checks.append(targets)
        return full.isdisjoint(targets)

    waiting = WaitingQueue(has_room)
    targets = [[1, 2]] * 100 + [[1], [], [1, 2], [1]]
    states = [make_state(str(i), Clock(), t, arrival=float(i)) for i, t in enumerate(targets)]
    for state in states:
        waiting.add(state)
    order = []
    while (state := waiting.first()) is not None:
        order.append(state.request_id)
        waiting.remove(state)
    assert order == ["100", "101", "103"] and len(waiting) == 101
    assert len(checks) <= 4 * 3, "the first hundred are not checked one by one"
    full.clear()
    assert waiting.first() is states[0]
