# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are prompt, new or known, against a loop over all of them; and slots."""

import random

import numpy as np
import pytest

from vllm_omni.worker.feedback_rows import RequestSlots, StepRows, sort_rows


def expected(
    slots: list[int], frames: list[int], computed: list[int], prompt: list[int], counts: list[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompt pieces as `(slot, row, start, stop, request)`; new and known rows as `(row, request, slot, frame)`."""
    prompts, new, known, row = [], [], [], 0
    for request, slot in enumerate(slots):
        stop = min(computed[request] + counts[request], prompt[request])
        if computed[request] < prompt[request]:
            prompts.append((slot, row, computed[request], stop, request))
        for position in range(computed[request], computed[request] + counts[request]):
            frame = position - prompt[request]
            if frame >= 0:
                (known if frame < frames[slot] else new).append((row, request, slot, frame))
            row += 1
    return prompts, new, known


def as_lists(step: StepRows) -> tuple[list[tuple[int, ...]], ...]:
    known = [] if step.known is None else [tuple(map(int, row)) for row in zip(*step.known, strict=True)]
    return (
        [tuple(prompt) for prompt in step.prompts],
        [tuple(map(int, row)) for row in zip(*step.new, strict=True)],
        known,
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_step(seed: int) -> None:
    """Requests in their prompts, decoding, and computing again what was preempted, chunk by chunk."""
    random.seed(seed)
    num_reqs = random.randint(1, 6)
    slots = random.sample(range(9), num_reqs)
    frames, computed, prompt, counts = [0] * 9, [], [], []
    for slot in slots:
        prompt.append(random.randint(1, 5))
        frames[slot] = random.choice([0, 0, 1, 4])
        known = prompt[-1] + frames[slot] + random.choice([0, 1])  # with a token that was sampled and not fed back
        computed.append(random.choice([known - 1, random.randrange(known)]))
        counts.append(random.choice([known - computed[-1], 1]))
    arrays = [np.array(values) for values in (slots, frames)]
    arrays += [np.array(values, dtype=np.int32) for values in (computed, prompt, counts)]
    step = sort_rows(*arrays)
    assert as_lists(step) == expected(slots, frames, computed, prompt, counts)
    assert step.new.frames.dtype == np.int64


def test_a_step_that_only_decodes_has_a_row_for_each_request() -> None:
    arrays = (np.array([4, 0]), np.array([2, 0, 0, 0, 7]), np.array([12, 5]), np.array([5, 3]), np.array([1, 1]))
    step = sort_rows(*arrays)
    assert (step.prompts, step.known) == ([], None)
    assert [part.tolist() for part in step.new] == [[0, 1], [0, 1], [4, 0], [7, 2]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_token_of_two_sequences_with_one_slot_is_fed_back_once(order: tuple[int, int]) -> None:
    """The first has four rows of its prompt and two tokens; the other one row."""
    computed, prompt, counts = (np.array(values)[list(order)] for values in ((5, 1), (4, 1), (1, 2)))
    step = sort_rows(np.array([3, 3]), np.array([0, 0, 0, 1]), computed, prompt, counts)
    assert step.known is not None
    rows = [(int(row), int(frame)) for row, frame in zip(step.known.rows, step.known.frames, strict=True)]
    assert step.new.frames.tolist() == [1]
    if order == (0, 1):
        assert (step.new.rows.tolist(), rows) == ([0], [(1, 0), (2, 1)])
    else:
        assert (step.new.rows.tolist(), rows) == ([1], [(0, 0), (2, 1)])


def test_a_shared_slot_is_free_when_both_have_released_it() -> None:
    slots = RequestSlots()
    slots.take("a")
    slots.share("twin", slots["a"])
    assert (slots.of(["twin"]).tolist(), slots.lowest_free, slots.get("other")) == ([0], 1, None)
    assert slots.take("b") == 1
    assert (slots.release("a"), slots.lowest_free) == (None, 2)
    assert (slots.release("twin"), slots.lowest_free) == (0, 0)


def test_two_new_tokens_of_one_request_are_refused() -> None:
    with pytest.raises(RuntimeError, match="several tokens"):
        sort_rows(np.array([0]), np.array([0]), np.array([3]), np.array([3]), np.array([2]))


def test_the_lowest_free_slot_is_taken_and_its_count_starts_at_zero() -> None:
    slots = RequestSlots()
    assert [slots.take(name) for name in "abcd"] == [0, 1, 2, 3]
    slots.num_frames[:4] = 9
    assert (slots.release("c"), slots.release("a"), slots.release("c")) == (2, 0, None)
    assert slots.lowest_free == 0
    assert [slots.take(name) for name in "ef"] == [0, 2]
    assert slots.of("fbed").tolist() == [2, 1, 0, 3]
    assert slots.num_frames[:4].tolist() == [0, 9, 0, 9]
    for index in range(100):
        assert slots.take(str(index)) == 4 + index
    assert len(slots.num_frames) > 103
    with pytest.raises(KeyError):
        slots.of(["unknown"])
