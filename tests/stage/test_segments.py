# SPDX-License-Identifier: Apache-2.0
"""When what an engine has made is passed on: by count, by the clock, and at the end."""

from vllm_omni.config.stage_config import SegmentConfig
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.segments import Segmenter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def piece(*tokens: int, step: int | None = None) -> StageOutput:
    return StageOutput(request_id="r", stage_id=0, completions=[Completion(token_ids=list(tokens))], step=step)


def tokens(segment: StageOutput | None) -> list[int] | None:
    return None if segment is None else segment.completions[0].token_ids


def test_the_first_token_goes_at_once_and_then_it_takes_enough_of_them() -> None:
    segmenter = Segmenter(SegmentConfig(max_segment_tokens=3, min_flush_interval_ms=1000), Clock())
    assert [tokens(segmenter.add(piece(i))) for i in range(6)] == [[0], None, None, [1, 2, 3], None, None]
    last = segmenter.finish(piece(6))
    assert tokens(last) == [4, 5, 6] and last.is_last


def test_what_is_held_goes_when_its_time_has_come() -> None:
    clock = Clock()
    segmenter = Segmenter(SegmentConfig(max_segment_tokens=100, min_flush_interval_ms=50), clock)
    segmenter.add(piece(0))
    assert segmenter.due is None
    clock.now += 0.02
    assert segmenter.add(piece(1)) is None
    assert segmenter.due == 100.05
    assert segmenter.flush_if_due() is None
    clock.now = 100.05
    segment = segmenter.flush_if_due()
    assert tokens(segment) == [1] and segment is not None and not segment.is_last
    clock.now += 1
    assert tokens(segmenter.add(piece(2))) == [2], "the interval had passed already"


def test_a_segment_may_be_large_and_is_never_cut() -> None:
    segmenter = Segmenter(SegmentConfig(max_segment_tokens=2, min_flush_interval_ms=1000), Clock())
    segmenter.add(piece(0))
    assert tokens(segmenter.add(piece(1, 2, 3, 4))) == [1, 2, 3, 4]


def test_without_a_policy_and_for_progress_nothing_is_held() -> None:
    assert tokens(Segmenter(None).add(piece(1))) == [1]
    segmenter = Segmenter(SegmentConfig(max_segment_tokens=100, min_flush_interval_ms=1e6), Clock())
    segmenter.add(piece(0))
    segment = segmenter.add(piece(step=3))
    assert segment is not None and segment.step == 3
