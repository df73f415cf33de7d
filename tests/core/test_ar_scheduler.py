# SPDX-License-Identifier: Apache-2.0
"""Which requests a step takes, on the scheduler of a real engine; nothing here looks at outputs."""

from collections import Counter

import pytest

from tests.engine.running import greedy, last_outputs, random_prompts
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.errors import InvalidRequestError


@pytest.fixture(scope="module")
def engine(tiny_qwen3):
    from vllm_omni.engine.engine_args import create_engine_args

    arguments = {"max_model_len": 128, "kv_cache_memory_bytes": 16 << 20, "block_size": 32, "max_num_seqs": 4}
    engine = OmniLLMEngine.from_omni_engine_args(
        create_engine_args(str(tiny_qwen3), dtype="float32", enforce_eager=True, **arguments)
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def steps(engine):
    """Records of the steps that are done."""
    done = []
    engine.watch_steps(lambda step: None, done.append)
    yield done
    engine.abort_request(list(engine.output_processor.external_req_ids))
    while engine.has_work():
        engine.step()


def add(engine, request_id, length=8, num_ready_tokens=None, **parameters):
    (prompt,) = random_prompts(length)
    engine.add_request(request_id, {"prompt_token_ids": prompt}, greedy(20, **parameters))
    if num_ready_tokens is not None:
        engine.await_input(request_id, num_ready_tokens)


@pytest.fixture
def batches(engine, steps):
    """Takes so many steps, and returns the requests of each."""

    def take(num_steps):
        start = len(steps)
        for _ in range(num_steps):
            engine.step()
        return ["".join(sorted(step.num_computed_tokens)) for step in steps[start:]]

    return take


def test_only_the_request_without_input_is_held(engine, batches):
    add(engine, "a")
    add(engine, "b", num_ready_tokens=9)
    assert batches(4) == ["ab", "ab", "a", "a"]
    engine.add_input("b", {}, 10, is_last=False)
    assert batches(3) == ["ab", "a", "a"]
    engine.add_input("b", {}, None, is_last=True)
    assert batches(2) == ["ab", "ab"]


def test_has_work_only_if_a_step_can_do_something(engine, steps):
    assert not engine.has_work()
    add(engine, "a", num_ready_tokens=8)
    assert engine.has_work()
    engine.step()
    assert not engine.has_work() and engine.has_unfinished_requests()
    engine.add_input("a", {"x": 1}, 8, is_last=False)
    assert not engine.has_work()
    engine.add_input("a", {}, 9, is_last=False)
    assert engine.has_work()
    engine.step()
    assert not engine.has_work()
    engine.abort_request(["a"])
    assert engine.has_work(), "the workers do not know yet"
    engine.step()
    assert not engine.has_work() and steps[-1].num_sequences == 0


def test_held_while_preempted(engine, batches, steps):
    add(engine, "a", num_ready_tokens=9)
    add(engine, "b")
    assert batches(3) == ["ab", "ab", "b"]
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert batches(2) == ["b", "b"]
    engine.add_input("a", {}, None, is_last=True)
    assert batches(1) == ["ab"]
    assert steps[-1].num_computed_tokens["a"] == 10  # All that it has, again.


def test_blocks(engine):
    used, total = engine.kv_blocks()
    assert used == 0 and total > 8
    add(engine, "a", length=40)
    engine.step()
    assert engine.kv_blocks() == (2, total)


def test_several_sequences_are_one_request(engine, batches, steps):
    add(engine, "a", n=2, temperature=1.0, num_ready_tokens=8)
    assert batches(1) == ["a"] and steps[-1].num_sequences == 2
    assert not engine.has_work()
    engine.add_input("a", {}, None, is_last=True)
    assert batches(1) == ["a"] and steps[-1].num_sequences == 2


def test_input_for_an_unknown_request_and_input_that_cannot_be_serialized(engine):
    engine.add_input("unknown", {"x": 1}, None, is_last=True)
    add(engine, "a", num_ready_tokens=8)
    engine.step()
    with pytest.raises(InvalidRequestError, match="set"):
        engine.add_input("a", {"x": {1}}, None, is_last=True)
    assert not engine.has_work()


class TestQuarantine:
    def test_every_other_step_until_the_isolation_ends(self, engine, batches):
        for request_id in "abcd":
            add(engine, request_id)
        engine.isolate("b", 9)
        engine.isolate("d", 8)
        assert batches(8) == ["b", "ac", "b", "abc", "d", "abcd", "abcd", "abcd"]

    def test_only_isolated_requests(self, engine, batches):
        add(engine, "a")
        add(engine, "b", num_ready_tokens=8)
        engine.isolate("a", 9)
        engine.isolate("b", 9)
        assert batches(6) == ["a", "a", "a", "b", "a", "a"]

    def test_of_one_that_is_aborted(self, engine, batches):
        add(engine, "a")
        add(engine, "b")
        engine.isolate("a", 30)
        assert batches(1) == ["a"]
        engine.abort_request(["a"])
        assert batches(2) == ["b", "b"]


def test_many_sequences_of_a_request_leave_places_to_others(engine, batches):
    """The engine has four places."""
    add(engine, "a", n=8, temperature=1.0, seed=1)
    assert batches(3) == ["a", "a", "a"]
    add(engine, "b")
    add(engine, "c", n=2, temperature=1.0, seed=1)
    assert batches(2) == ["abc", "abc"]
    running = Counter(request.external_req_id for request in engine._scheduler.running)
    assert running == {"a": 2, "b": 1, "c": 1}


def test_sequences_that_were_preempted_for_others_are_the_same(engine):
    def sequences():
        return [completion.token_ids for completion in last_outputs(engine)[0].outputs]

    add(engine, "0", n=8, temperature=1.0, seed=1)
    alone = sequences()
    assert len({tuple(tokens) for tokens in alone}) == 8
    add(engine, "0", n=8, temperature=1.0, seed=1)
    for _ in range(5):
        engine.step()
    for name in "123":
        add(engine, name)
    assert sequences() == alone


def test_requests_of_one_sequence_keep_their_order(engine, batches):
    for name in "abcdef":
        add(engine, name)
    assert batches(2) == ["abcd", "abcd"]
    engine.abort_request(["a", "c"])
    assert batches(2) == ["bdef", "bdef"]
