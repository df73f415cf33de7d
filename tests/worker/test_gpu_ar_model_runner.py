# SPDX-License-Identifier: Apache-2.0
"""Rows leave exactly once, in order, whatever is computed again; without an engine."""

import random

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker.gpu_ar_model_runner import LeavingRows, OutputWithRows, RowTracker, SelectedRows


def span(req_id, start, position, num_rows, num_prompt, num_tokens):
    return RequestSpan(req_id, start, start + num_rows, position, num_prompt, num_tokens, SamplingParams())


def start(tracker, *requests):
    """One step. Requests are `(req_id, position, num_rows, num_prompt, num_tokens)`; a row's value is its position."""
    spans, positions = [], []
    for req_id, position, num_rows, num_prompt, num_tokens in requests:
        spans.append(span(req_id, len(positions), position, num_rows, num_prompt, num_tokens))
        positions += range(position, position + num_rows)
    selected = SelectedRows({"position": torch.tensor(positions)[:, None]}, tracker.select(spans))
    return LeavingRows(selected, tracker.emit(spans, selected.parts))


def step(tracker, *requests):
    return leave(start(tracker, *requests))


def leave(rows):
    """The positions of each request's rows, once they have arrived."""
    out = rows.add_to(ModelRunnerOutput(req_ids=[], req_id_to_index={})).pooler_output
    return [None if rows is None else rows["position"][:, 0].tolist() for rows in out]


class TestAllRows:
    def test_prompt_then_tokens(self):
        tracker = RowTracker(emits_prompt_rows=True)
        assert step(tracker, ("a", 0, 3, 3, 3)) == [[0, 1, 2]]
        assert step(tracker, ("a", 3, 1, 3, 4)) == [[3]]

    def test_rows_of_an_incomplete_prompt_wait(self):
        tracker = RowTracker(emits_prompt_rows=True)
        assert step(tracker, ("a", 0, 2, 5, 5), ("b", 0, 1, 1, 1)) == [None, [0]]
        assert step(tracker, ("a", 2, 2, 5, 5)) == [None]
        assert step(tracker, ("b", 1, 1, 1, 2), ("a", 4, 1, 5, 5)) == [[1], [0, 1, 2, 3, 4]]

    def test_rows_computed_again_do_not_leave_again(self):
        tracker = RowTracker(emits_prompt_rows=True)
        step(tracker, ("a", 0, 3, 3, 3))
        step(tracker, ("a", 3, 1, 3, 4))
        assert step(tracker, ("a", 0, 5, 3, 5)) == [[4]]

    def test_preempted_inside_the_prompt(self):
        tracker = RowTracker(emits_prompt_rows=True)
        assert step(tracker, ("a", 0, 2, 5, 5)) == [None]
        assert step(tracker, ("a", 0, 3, 5, 5)) == [None]
        assert step(tracker, ("a", 3, 2, 5, 5)) == [[0, 1, 2, 3, 4]]

    def test_rows_that_arrive_while_the_next_step_is_computed(self):
        tracker = RowTracker(emits_prompt_rows=True)
        first = start(tracker, ("a", 0, 2, 5, 5), ("b", 0, 1, 1, 1))
        second = start(tracker, ("a", 2, 2, 5, 5), ("b", 1, 1, 1, 2))
        assert leave(first) == [None, [0]]
        third = start(tracker, ("b", 2, 1, 1, 3), ("a", 4, 1, 5, 5))
        assert leave(second) == [None, [1]]
        fourth = start(tracker, ("a", 5, 1, 5, 6))
        assert leave(third) == [[2], [0, 1, 2, 3, 4]] and leave(fourth) == [[5]]

    def test_a_request_that_ends_while_its_rows_arrive_leaves_nothing(self):
        tracker = RowTracker(emits_prompt_rows=True)
        first = start(tracker, ("a", 0, 2, 5, 5))
        tracker.remove("a")
        assert leave(first) == [None]
        assert step(tracker, ("a", 0, 2, 2, 2)) == [[0, 1]]

    def test_a_removed_request_starts_anew(self):
        tracker = RowTracker(emits_prompt_rows=True)
        step(tracker, ("a", 0, 2, 5, 5))
        tracker.remove("a")
        tracker.remove("unknown")
        assert step(tracker, ("a", 0, 1, 1, 1)) == [[0]]


class TestGeneratedRows:
    def test_prompt_rows_do_not_leave(self):
        tracker = RowTracker(emits_prompt_rows=False)
        assert step(tracker, ("a", 0, 2, 3, 3)) == [None]
        assert step(tracker, ("a", 2, 1, 3, 3)) == [None]
        assert step(tracker, ("a", 3, 1, 3, 4)) == [[3]]

    def test_rows_computed_again_do_not_leave_again(self):
        tracker = RowTracker(emits_prompt_rows=False)
        step(tracker, ("a", 0, 3, 3, 3))
        step(tracker, ("a", 3, 1, 3, 4))
        assert step(tracker, ("a", 0, 2, 3, 5)) == [None]
        assert step(tracker, ("a", 2, 3, 3, 5)) == [[4]]


@pytest.mark.parametrize("emits_prompt_rows", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_gives_every_row_once(seed, emits_prompt_rows):
    """Random chunks, pauses and preemptions of several requests."""
    random.seed(seed)
    tracker = RowTracker(emits_prompt_rows)
    prompt = {req_id: random.randint(1, 12) for req_id in "abc"}
    tokens, computed, left = dict(prompt), dict.fromkeys("abc", 0), {req_id: [] for req_id in "abc"}
    goal = {req_id: prompt[req_id] + random.randint(1, 8) for req_id in "abc"}
    while any(tokens[req_id] < goal[req_id] for req_id in "abc"):
        for req_id in "abc":
            if random.random() < 0.1:
                computed[req_id] = 0
        running = [req_id for req_id in "abc" if tokens[req_id] < goal[req_id] and random.random() < 0.8]
        sizes = {req_id: random.randint(1, tokens[req_id] - computed[req_id]) for req_id in running}
        if not running:
            continue
        out = step(tracker, *((r, computed[r], sizes[r], prompt[r], tokens[r]) for r in running))
        for req_id, rows in zip(running, out, strict=True):
            computed[req_id] += sizes[req_id]
            samples = computed[req_id] == tokens[req_id]
            assert samples or rows is None
            tokens[req_id] += samples
            left[req_id] += rows or []
    for req_id in "abc":
        first = 0 if emits_prompt_rows else prompt[req_id]
        assert left[req_id] == list(range(first, goal[req_id] - 1))


class TestSelectedRows:
    def test_every_row_is_in_memory_of_its_own(self):
        outputs = {"a": torch.zeros(4, 2), "b": torch.zeros(4)}
        rows = SelectedRows(outputs, [(0, 1), (2, 2), (2, 4)])
        rows.wait()
        assert [sorted(part) for part in rows.parts] == [["a", "b"], [], ["a", "b"]]
        outputs["a"].fill_(1)
        part = rows.parts[2]["a"]
        assert part.sum() == 0 and part.untyped_storage().nbytes() == part.nbytes

    def test_nothing_to_copy(self):
        rows = SelectedRows({"a": torch.zeros(4, 2)}, [(1, 1), (4, 4)])
        rows.wait()
        assert rows.parts == [{}, {}]


def test_what_vllm_keeps_of_a_step_that_raised_is_passed_on():
    kept = KVConnectorOutput()

    class Failed(AsyncModelRunnerOutput):
        def get_output(self):
            raise RuntimeError("the copy has failed")

        def get_kv_connector_output(self):
            return kept

    tracker = RowTracker(emits_prompt_rows=True)
    output = OutputWithRows(Failed(), start(tracker, ("a", 0, 3, 3, 3)))
    with pytest.raises(RuntimeError, match="the copy has failed"):
        output.get_output()
    assert output.get_kv_connector_output() is kept
