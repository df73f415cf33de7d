# SPDX-License-Identifier: Apache-2.0
"""A model's state between windows: the next window starts from it, a repeated one from the state before."""

import pytest

from vllm_omni.core.sched.output import RequestWindow
from vllm_omni.worker.gpu_generation_model_runner import ModelStates


def window(index: int, request_id: str = "a", is_last: bool = False) -> RequestWindow:
    return RequestWindow(request_id, index, is_last)


def compute(states: ModelStates, window: RequestWindow) -> list[int]:
    """Appends the window's index to the state, and returns the state."""
    state = states.load(window)
    state["seen"] = [*state.get("seen", []), window.index]
    states.save(window, state)
    return state["seen"]


def test_each_window_starts_from_the_one_before() -> None:
    states = ModelStates()
    assert [compute(states, window(index)) for index in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert compute(states, window(0, "b")) == [0] and len(states) == 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_repeated_window_starts_from_the_same_state(index: int) -> None:
    states = ModelStates()
    for before in range(index):
        compute(states, window(before))
    first = compute(states, window(index))
    assert compute(states, window(index)) == compute(states, window(index)) == first
    assert compute(states, window(index + 1)) == [*first, index + 1]


def test_a_loaded_state_is_a_copy() -> None:
    states = ModelStates()
    compute(states, window(0))
    states.load(window(1))["seen"] = "nonsense"
    assert compute(states, window(1)) == [0, 1]


def test_a_request_of_one_window_keeps_no_state() -> None:
    states = ModelStates()
    assert compute(states, window(0, is_last=True)) == [0] and len(states) == 0


def test_the_last_window_s_state_is_kept_until_release() -> None:
    states = ModelStates()
    compute(states, window(0))
    compute(states, window(1, is_last=True))
    assert compute(states, window(1, is_last=True)) == [0, 1]
    states.release("a")
    states.release("unknown")
    assert len(states) == 0


@pytest.mark.parametrize("index", [1, 3])
def test_a_window_without_the_one_before_it_is_refused(index: int) -> None:
    states = ModelStates()
    if index == 3:
        compute(states, window(0))
        compute(states, window(1))
    with pytest.raises(RuntimeError, match=f"window {index} of request 'a'"):
        states.load(window(index))
