# SPDX-License-Identifier: Apache-2.0
"""Fan-in: which inputs of a request are in one call of the stage input processor; the phases of a request."""

import pytest
import torch

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.messages import InlineRef, SubmitMessage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.request_state import InputStreams, Phase, RequestState
from vllm_omni.stage.segments import Segmenter


def make_state() -> RequestState:
    submit = SubmitMessage(
        request_id="r", number=1, sources=[], targets=[], is_final=True, streams=False, payload=InlineRef(sizes=[])
    )
    return RequestState(
        submit=submit,
        request=StageRequest(request_id="r"),
        inputs=InputStreams({}),
        outputs=Segmenter(),
        metrics=StageMetrics(stage_id=0, name="a"),
    )


WHOLE = WindowConfig()
TWO_ROWS = WindowConfig(window_size=2, first_window_size=2, unit="rows")


def rows(source: int, count: int, is_last: bool = False) -> StageOutput:
    return StageOutput(request_id="r", stage_id=source, tensors={"rows": torch.full((count,), source)}, is_last=is_last)


def calls(streams: InputStreams) -> list[tuple[dict[int, int], bool]]:
    """The calls that are ready: the rows of each source, and whether it is the last."""
    found = []
    while streams.is_ready:
        sources, is_last = streams.next_call()
        found.append(({source: len(o.tensors["rows"]) for source, o in sources.items()}, is_last))
    return found


def test_a_first_stage_is_ready_at_once() -> None:
    assert calls(InputStreams({})) == [({}, True)]


def test_whole_outputs_are_in_one_call() -> None:
    streams = InputStreams({0: WHOLE, 1: WHOLE})
    streams.add(0, rows(0, 3, True))
    assert calls(streams) == []
    streams.add(1, rows(1, 1))
    assert calls(streams) == []
    streams.add(1, rows(1, 1, True))
    assert calls(streams) == [({0: 3, 1: 2}, True)]
    assert not streams.is_ready


def test_a_whole_output_is_in_every_call() -> None:
    streams = InputStreams({0: WHOLE, 1: TWO_ROWS})
    assert streams.add(1, rows(1, 4)) == 2
    assert calls(streams) == []
    streams.add(0, rows(0, 5, True))
    assert calls(streams) == [({0: 5, 1: 2}, False)] * 2
    streams.add(1, rows(1, 1, True))
    assert calls(streams) == [({0: 5, 1: 1}, True)]


def test_two_streams_advance_together_until_one_ends() -> None:
    streams = InputStreams({0: TWO_ROWS, 1: TWO_ROWS})
    streams.add(0, rows(0, 2, True))
    assert calls(streams) == []
    streams.add(1, rows(1, 6))
    assert calls(streams) == [({0: 2, 1: 2}, False), ({1: 2}, False), ({1: 2}, False)]
    streams.add(1, rows(1, 0, True))
    assert calls(streams) == [({1: 0}, True)], "the last call has no more windows of the other stream"


def test_phases_are_entered_in_their_order() -> None:
    state = make_state()
    for phase in (Phase.QUEUED, Phase.STARTED, Phase.IN_ENGINE):
        with pytest.raises(AssertionError, match=f"{state.phase.name} to {state.phase.name}"):
            state.enter(state.phase)
        assert state.enter(phase) == phase - 1
    assert state.has_place
    assert state.enter(Phase.ENDED) is Phase.IN_ENGINE
    assert not state.has_place
    with pytest.raises(AssertionError, match="ENDED to ENDED"):
        state.enter(Phase.ENDED)


def test_a_request_may_end_in_any_phase() -> None:
    state = make_state()
    assert state.enter(Phase.ENDED) is Phase.NEEDS_INPUT
