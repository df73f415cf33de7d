# SPDX-License-Identifier: Apache-2.0
"""When segments are sent: by count, by time, and at the end."""

import pytest
import torch

from vllm_omni.config.stage_config import SegmentConfig, WindowConfig
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.segments import CallerReader, Segmenter, WindowReader
from vllm_omni.stage.window import WindowState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def piece(*tokens: int, step: int | None = None) -> StageOutput:
    return StageOutput(request_id="r", stage_id=0, completions=[Completion(token_ids=list(tokens))], step=step)


def for_caller(max_segment_tokens: int, min_flush_interval_ms: float, clock: Clock) -> Segmenter:
    config = SegmentConfig(max_segment_tokens=max_segment_tokens, min_flush_interval_ms=min_flush_interval_ms)
    return Segmenter([CallerReader(config, clock)], clock)


def tokens(segment: StageOutput | None) -> list[int] | None:
    return None if segment is None else segment.completions[0].token_ids


def test_the_first_token_is_sent_at_once_and_later_ones_by_count() -> None:
    segmenter = for_caller(3, 1000, Clock())
    assert [tokens(segmenter.add(piece(i))) for i in range(6)] == [[0], None, None, [1, 2, 3], None, None]
    last, _ = segmenter.finish(piece(6))
    assert tokens(last) == [4, 5, 6] and last.is_last


def test_held_tokens_are_sent_with_the_first_one_after_the_interval() -> None:
    clock = Clock()
    segmenter = for_caller(100, 50, clock)
    sent = []
    for number in range(6):
        sent.append(tokens(segmenter.add(piece(number))))
        clock.now += 0.03
    assert sent == [[0], None, [1, 2], None, [3, 4], None]


def test_held_tokens_are_sent_after_two_intervals_without_one() -> None:
    clock = Clock()
    segmenter = for_caller(100, 50, clock)
    segmenter.add(piece(0))
    due = [segmenter.due]
    clock.now += 0.02
    assert segmenter.add(piece(1)) is None
    assert [*due, segmenter.due] == [None, 100.1]
    assert segmenter.flush_if_due() is None
    clock.now = 100.1
    segment = segmenter.flush_if_due()
    assert tokens(segment) == [1] and segment is not None and not segment.is_last
    clock.now += 1
    assert tokens(segmenter.add(piece(2))) == [2], "the interval had passed already"


def test_a_large_segment_is_not_cut() -> None:
    segmenter = for_caller(2, 1000, Clock())
    segmenter.add(piece(0))
    assert tokens(segmenter.add(piece(1, 2, 3, 4))) == [1, 2, 3, 4]


def test_without_readers_and_for_progress_nothing_is_held() -> None:
    assert tokens(Segmenter().add(piece(1))) == [1]
    segmenter = for_caller(100, 1e6, Clock())
    segmenter.add(piece(0))
    segment = segmenter.add(piece(step=3))
    assert segment is not None and segment.step == 3


def rows(count: int) -> StageOutput:
    codes = {"codes": torch.zeros(count, 4)} if count else {}
    return StageOutput(request_id="r", stage_id=0, completions=[Completion(token_ids=[1] * count)], tensors=codes)


@pytest.mark.parametrize("unit", ["tokens", "codes"])
def test_a_window_is_sent_as_soon_as_it_is_complete(unit: str) -> None:
    config = WindowConfig(window_size=8, first_window_size=2, window_growth=2, unit=unit)
    segmenter, state = Segmenter([WindowReader(config)]), WindowState(config)
    sent = []
    for number in range(1, 31):
        segment = segmenter.add(rows(1))
        if segment is not None:
            (window,) = state.add(segment)
            sent.append((number, window.start))
    assert sent == [(2, 0), (6, 2), (14, 6), (22, 14), (30, 22)]
    assert segmenter.due is None
    assert state.add(segmenter.finish(rows(0))[0])[0].is_last


def test_a_segment_is_sent_when_it_is_due_for_one_reader() -> None:
    window = WindowReader(WindowConfig(window_size=5, first_window_size=2))
    clock = Clock()
    caller = CallerReader(SegmentConfig(max_segment_tokens=3, min_flush_interval_ms=1e6), clock)
    segmenter = Segmenter([caller, window], clock)
    sent = [tokens(segmenter.add(piece(i))) for i in range(8)]
    assert sent == [[0], [1], None, None, [2, 3, 4], None, [5, 6], None]


def test_pieces_larger_than_windows() -> None:
    segmenter = Segmenter([WindowReader(WindowConfig(window_size=3, first_window_size=3))])
    assert [tokens(segmenter.add(rows(n))) is not None for n in (7, 1, 1, 2, 1)] == [True, False, True, False, True]


def test_sentences_are_sent_as_soon_as_one_is_complete() -> None:
    config = WindowConfig(window_size=1, unit="sentences")
    segmenter, state = Segmenter([WindowReader(config)]), WindowState(config)
    windows = []
    text = "Now, as you see, it works, as it should. Mr. Fox said so! The end"
    for word in text.split():
        completions = [Completion(text=f"{word} ")]
        segment = segmenter.add(StageOutput(request_id="r", stage_id=0, completions=completions))
        if segment is not None:
            (window,) = state.add(segment)
            windows.append((word, window.completions[0].text))
    assert windows == [
        ("it", "Now, as you see, "), ("Mr.", "it works, as it should. "), ("The", "Mr. Fox said so! ")
    ]  # fmt: skip
