# SPDX-License-Identifier: Apache-2.0
"""What a model remembers of a stream: the next window goes on from it, one that comes again starts where it started."""

import pytest

from vllm_omni.core.sched.output import StreamWindow
from vllm_omni.worker.streams import Streams


def window(index: int, stream_id: str = "a", is_last: bool = False) -> StreamWindow:
    return StreamWindow(stream_id, index, is_last)


def compute(streams: Streams, window: StreamWindow) -> list[int]:
    """Appends the window's index to what is remembered, and returns that."""
    state = streams.open(window)
    state["seen"] = [*state.get("seen", []), window.index]
    streams.save(window, state)
    return state["seen"]


def test_windows_go_on_from_each_other() -> None:
    streams = Streams()
    assert [compute(streams, window(index)) for index in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert compute(streams, window(0, "b")) == [0] and len(streams) == 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_window_that_comes_again_starts_where_it_started(index: int) -> None:
    streams = Streams()
    for before in range(index):
        compute(streams, window(before))
    first = compute(streams, window(index))
    assert compute(streams, window(index)) == compute(streams, window(index)) == first
    assert compute(streams, window(index + 1)) == [*first, index + 1]


def test_what_is_opened_and_not_saved_changes_nothing() -> None:
    streams = Streams()
    compute(streams, window(0))
    streams.open(window(1))["seen"] = "nonsense"
    assert compute(streams, window(1)) == [0, 1]


def test_a_whole_leaves_nothing() -> None:
    streams = Streams()
    assert compute(streams, window(0, is_last=True)) == [0] and len(streams) == 0


def test_the_last_window_s_state_waits_for_the_release() -> None:
    streams = Streams()
    compute(streams, window(0))
    compute(streams, window(1, is_last=True))
    assert compute(streams, window(1, is_last=True)) == [0, 1]
    streams.release("a")
    streams.release("unknown")
    assert len(streams) == 0


@pytest.mark.parametrize("index", [1, 3])
def test_a_window_without_the_one_before_it_is_refused(index: int) -> None:
    streams = Streams()
    if index == 3:
        compute(streams, window(0))
        compute(streams, window(1))
    with pytest.raises(RuntimeError, match=f"window {index} of stream 'a'"):
        streams.open(window(index))
