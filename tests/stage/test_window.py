# SPDX-License-Identifier: Apache-2.0
"""Windows: every unit is in one window, in order, with the configured context."""

import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.window import WindowState


def pieces(sizes: list[int]) -> Iterator[StageOutput]:
    """A stream of units 0, 1, ... as tokens, as rows of `codes`, and as words, cut into pieces of these sizes."""
    start = 0
    for number, size in enumerate(sizes):
        units = list(range(start, start + size))
        text = "".join(f"{unit} " for unit in units)
        yield StageOutput(
            request_id="r",
            stage_id=0,
            prompt_token_ids=[9] if number == 0 else [],
            completions=[Completion(text=text, token_ids=units)],
            tensors={"codes": torch.tensor(units).reshape(-1, 1)} if units else {},
            is_last=number == len(sizes) - 1,
        )
        start += size


def units_of(window: StageOutput, unit: str) -> list[int]:
    if unit == "tokens":
        return window.completions[0].token_ids
    return window.tensors[unit].flatten().tolist() if unit in window.tensors else []


@pytest.mark.parametrize("unit", ["tokens", "codes"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("left_context", [0, 1, 7])
def test_any_stream_in_any_windows(unit: str, size: int, first: int, left_context: int) -> None:
    config = WindowConfig(window_size=size, first_window_size=first, left_context=left_context, unit=unit)
    for seed in range(20):
        sizes = [random.Random(seed).choice([0, 1, 1, 3, 8]) for _ in range(random.Random(-seed).randint(1, 9))]
        state = WindowState(config)
        windows = [window for piece in pieces(sizes) for window in state.add(piece)]
        total = sum(sizes)
        own = [units_of(window, unit)[window.context :] for window in windows]
        assert [u for units in own for u in units] == list(range(total))
        assert [window.is_last for window in windows] == [False] * (len(windows) - 1) + [True]
        assert state.has_ended
        assert [len(units) for units in own[:-1]] == ([first] + [size] * len(own))[: len(own) - 1]
        for window in windows:
            units = units_of(window, unit)
            if units:
                assert units == list(range(window.start - window.context, window.start - window.context + len(units)))
                assert window.context == min(left_context, window.start) or len(units) == window.context == 0
        text = "".join(window.completions[0].text for window in windows if window.completions)
        assert text == "".join(f"{unit} " for unit in range(total))
        assert windows[0].prompt_token_ids == [9] and not any(window.prompt_token_ids for window in windows[1:])


def test_a_window_is_returned_as_soon_as_it_is_complete() -> None:
    state = WindowState(WindowConfig(window_size=4, first_window_size=2, unit="codes"))
    counts = [len(state.add(piece)) for piece in pieces([1, 1, 3, 1, 9, 0])]
    assert counts == [0, 1, 0, 1, 2, 1]


def test_without_a_window_size_there_is_one_window_at_the_end() -> None:
    state = WindowState(WindowConfig())
    *none, (whole,) = [state.add(piece) for piece in pieces([2, 0, 3])]
    assert none == [[], []]
    assert whole.completions[0].token_ids == [0, 1, 2, 3, 4]
    assert whole.tensors["codes"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert (whole.start, whole.context, whole.is_last) == (0, 0, True)


def test_fields_other_than_the_unit_are_not_cut() -> None:
    state = WindowState(WindowConfig(window_size=2, first_window_size=2, unit="codes"))
    first, last = [window for piece in pieces([1, 3]) for window in state.add(piece)]
    assert (first.completions[0].token_ids, units_of(first, "codes")) == ([0, 1, 2, 3], [0, 1])
    assert (last.completions, units_of(last, "codes")) == ([], [2, 3])


@pytest.mark.parametrize(
    ("first", "right_context", "expected"),
    [
        (4, 0, [4, 6, 9, 14, 21, 25, 21]),
        (8, 4, [8, 6, 9, 14, 21, 25, 17]),  # of the first window 4 can be played, of the others 6, 9, 14, ...
        (4, 9, [4, 6, 2, 3, 5, 8, 12, 18, 25, 17]),  # nothing of the first, 1 of the second, 2, 3, 5, ...
    ],
)
def test_windows_grow(first: int, right_context: int, expected: list[int]) -> None:
    config = WindowConfig(
        window_size=25, first_window_size=first, window_growth=1.5, right_context=right_context, unit="codes"
    )
    state = WindowState(config)
    windows = [window for piece in pieces([1] * 100) for window in state.add(piece)]
    assert [len(units_of(window, "codes")) for window in windows] == expected


def spoken(*texts: str) -> Iterator[StageOutput]:
    """A stream with these pieces of text, each with a token; the last one only ends it."""
    for number, text in enumerate(texts):
        completion = Completion(text=text, token_ids=[number])
        yield StageOutput(request_id="r", stage_id=0, completions=[completion], is_last=False)
    yield StageOutput(request_id="r", stage_id=0, completions=[Completion(finish_reason="stop")])


TEXT = "Well, as far as I know, it works. Mr. Fox said so! Really? Yes, he did. It was in May.\nThe end"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"first_window_size": -1}, ["Well, as far as I know, ", "it works. ", "Mr. Fox said so! ", "Really? ",
                                     "Yes, he did. ", "It was in May.\n", "The end"]),
        ({"first_window_size": -1, "window_size": 3}, ["Well, as far as I know, ",
                                                       "it works. Mr. Fox said so! Really? ",
                                                       "Yes, he did. It was in May.\nThe end"]),
        ({"first_window_size": 2, "window_size": 4}, ["Well, as far as I know, it works. Mr. Fox said so! ",
                                                      "Really? Yes, he did. It was in May.\nThe end"]),
        ({"first_window_size": -1, "window_size": 9, "window_growth": 2.0},
         ["Well, as far as I know, ", "it works. Mr. Fox said so! ", "Really? Yes, he did. It was in May.\nThe end"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_windows_of_sentences(sizes: dict[str, float], expected: list[str], seed: int) -> None:
    config = msgspec.structs.replace(WindowConfig(window_size=1, unit="sentences"), **sizes)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(TEXT)), rng.choice([0, 5, len(TEXT) - 1])))
    texts = [TEXT[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    state = WindowState(config)
    windows = [window for piece in spoken(*texts) for window in state.add(piece)]
    assert [window.completions[0].text for window in windows] == expected
    assert [window.is_last for window in windows] == [False] * (len(expected) - 1) + [True]
    assert [window.start for window in windows][:2] == [0, sizes["first_window_size"] if len(expected) == 2 else 1]
    assert [t for window in windows for t in window.completions[0].token_ids] == list(range(len(texts)))
    assert windows[-1].finish_reason == "stop" and not any(window.context for window in windows)


def test_a_text_that_is_empty_or_not_there_is_one_empty_window() -> None:
    config = WindowConfig(window_size=1, unit="sentences")
    (window,) = [window for piece in spoken("", "") for window in WindowState(config).add(piece)]
    assert window.completions[0].text == "" and window.is_last
    (window,) = WindowState(config).add(StageOutput(request_id="r", stage_id=0))
    assert window.completions[0].text == "" and window.is_last


def test_other_completions_are_not_cut() -> None:
    state = WindowState(WindowConfig(window_size=1, unit="sentences"))
    both = [Completion(text="One. Two. T"), Completion(index=1, text="Other. Text. T")]
    first, second = state.add(StageOutput(request_id="r", stage_id=0, completions=both, is_last=False))
    assert [c.text for c in first.completions] == ["One. ", "Other. Text. T"]
    assert [c.text for c in second.completions] == ["Two. "]
