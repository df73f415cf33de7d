# SPDX-License-Identifier: Apache-2.0
"""A request that makes a step raise fails alone; an engine that cannot be trusted any more ends its stage."""

import pytest
import torch

from tests.engine.running import greedy, random_prompts
from tests.stage.running_engine import RunningEngine
from tests.stage.test_llm_engine import (
    assert_equal,
    assert_nothing_is_left,
    chunk,
    first_part,
    next_part,
    ready_made,
    whole,
)
from vllm_omni.inputs import StageInput
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox
from vllm_omni.stage.engines.llm import LLMStageEngine


def bad(request_id: str, prompt: list[int], raise_at: int, max_tokens: int = 20) -> NewRequest:
    request = whole(request_id, prompt, greedy(max_tokens))
    request.stage_input = StageInput(prompt_token_ids=prompt, additional_information={"raise_at": raise_at})
    return request


def alone(running: RunningEngine, *requests: NewRequest) -> list[StageOutput]:
    """Their outputs, when each runs by itself."""
    outputs = []
    for request in requests:
        running.put(request)
        outputs += running.finish(request.request_id)
    running.items.clear()
    running.counter.batch_sizes.clear()
    return outputs


@pytest.fixture
def runner(ar):
    return ar.engine._engine.model_executor.driver_worker.model_runner


@pytest.mark.parametrize("raise_at", [0, 11, 20], ids=["prompt", "first row", "later"])
def test_only_the_guilty_one_fails(ar, raise_at):
    prompts = random_prompts(20, 11, 70)
    good = [whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25))]
    expected = alone(ar, *good)
    ar.put(good[0], bad("b", prompts[1], raise_at), good[1])
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert f"asked to raise at {raise_at}" in ar.error("b").error and "_extra" in ar.error("b").traceback
    assert 2 in ar.counter.batch_sizes  # The others do not stay alone.
    assert_nothing_is_left(ar)


def test_requests_that_were_preprocessed_by_their_caller(ar):
    prompts = random_prompts(20, 11, 70)
    expected = alone(ar, whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25)))
    good = [ready_made(ar, "a", prompts[0], greedy(25)), ready_made(ar, "c", prompts[2], greedy(25))]
    ar.put(good[0], bad("b", prompts[1], 15), good[1])
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert "raise at 15" in ar.error("b").error


def test_several_guilty_ones(ar):
    prompts = random_prompts(20, 11, 30, 12)
    good = [whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25))]
    expected = alone(ar, *good)
    ar.put(good[0], bad("b", prompts[1], 15), good[1], bad("d", prompts[3], 13))
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert "raise at 15" in ar.error("b").error and "raise at 13" in ar.error("d").error
    assert_nothing_is_left(ar)


def test_one_that_has_streamed_cannot_start_again(ar):
    prompts = random_prompts(20, 11, 8)
    streamed = whole("a", prompts[0], greedy(25), streams_output=True)
    waiting = whole("c", prompts[2], greedy(25), streams_output=True)
    ar.put(streamed, bad("b", prompts[1], 15))
    ar.put(waiting)
    ar.wait_asleep()
    assert "raise at 15" in ar.error("a").error and len(ar.items["a"]) > 1
    assert "raise at 15" in ar.error("b").error
    assert_nothing_is_left(ar)


def test_held_and_waiting_requests_start_again_with_their_chunks(ar):
    feed = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)) * 0.2
    prompts = random_prompts(20, 11)
    (expected,) = alone(ar, whole("a", prompts[0], greedy(25), feed))
    ar.put(first_part("a", prompts[0], greedy(25), feed, 2), next_part("a", prompts[0], feed, 2, 4))
    ar.wait_asleep()
    ar.put(bad("b", prompts[1], 15), next_part("a", prompts[0], feed, 4, 5))
    ar.wait_asleep()
    assert "raise at 15" in ar.error("b").error and not ar.items["a"]
    ar.put(next_part("a", prompts[0], feed, 5, 16, is_last=True))
    assert_equal(*ar.finish("a"), expected)
    assert_nothing_is_left(ar)


def test_suspects_do_not_wait_for_one_that_is_held(ar):
    """`held` is a suspect, too, and gets no input: the others finish all the same."""
    feed = torch.zeros(16, 128)
    prompts = random_prompts(20, 11, 9)
    (expected,) = alone(ar, whole("c", prompts[2], greedy(25)))
    ar.put(
        first_part("held", prompts[0], greedy(25), feed, 1),
        bad("b", prompts[1], 11),
        whole("c", prompts[2], greedy(25)),
    )
    assert_equal(*ar.finish("c"), expected)
    assert "raise at 11" in ar.error("b").error and not ar.items["held"]
    ar.put(AbortRequest("held"), chunk("held", is_last=True))
    ar.wait_asleep()
    assert_nothing_is_left(ar)


def test_what_only_a_batch_raises_ends_too(ar, runner, monkeypatch):
    """Nobody is found out: alone they are fine, so they meet again, until one has met too often."""
    make_rows = runner._make_rows

    def broken(state, spans):
        if len(spans) > 1:
            raise RuntimeError("no batches")
        return make_rows(state, spans)

    monkeypatch.setattr(runner, "_make_rows", broken)
    prompts = random_prompts(20, 11, 9)
    ar.put(*(whole(str(index), prompt, greedy(25)) for index, prompt in enumerate(prompts)))
    ar.wait_asleep()
    ends = [ar.items[str(index)] for index in range(3)]
    assert [len(end) for end in ends] == [1, 1, 1]
    errors = [end for (end,) in ends if isinstance(end, Error)]
    assert len(errors) >= 2 and all("no batches" in error.error for error in errors)
    assert_nothing_is_left(ar)


@pytest.mark.parametrize("place", ["schedule", "process_outputs"])
def test_outside_of_the_model(ar, monkeypatch, place):
    engine = ar.engine._engine
    owner = engine.output_processor if place == "process_outputs" else engine._core.scheduler.kv_cache_manager
    name = "process_outputs" if place == "process_outputs" else "allocate_slots"
    method = getattr(owner, name)

    def broken(*args, **kwargs):
        monkeypatch.setattr(owner, name, method)
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, broken)
    prompts = random_prompts(20, 11)
    ar.put(whole("a", prompts[0], greedy(1)), whole("b", prompts[1], greedy(1)))
    ar.wait_asleep()
    if place == "schedule":
        assert "broken" in ar.error("a").error and "broken" in ar.error("b").error
    else:
        assert len(ar.output("a").completions[0].token_ids) == len(ar.output("b").completions[0].token_ids) == 1
    assert_nothing_is_left(ar)


class Unrecoverable(RuntimeError):
    pass


BROKEN = torch.AcceleratorError("device-side assert")
# What vLLM's executor for several devices makes of it; `tests/worker/test_gpu_worker.py` holds that.
BROKEN_ELSEWHERE = RuntimeError("Worker failed with error 'the device cannot be used any more: device-side assert'")


@pytest.mark.parametrize(
    ("raised", "message"),
    [(BROKEN, "device-side assert"), (BROKEN_ELSEWHERE, "device-side assert"), (RuntimeError("step"), "clean-up")],
    ids=["device", "another worker's device", "clean-up"],
)
def test_a_broken_engine_ends_its_stage(ar, monkeypatch, raised, message):
    """On a stage engine that borrows the running one, so that the thread of the latter lives."""
    stage = LLMStageEngine(Outbox(), 1, str(ar.engine._engine.model_config.model), "ar", {})
    stage._engine = ar.engine._engine

    def step():
        raise raised

    def fail_all():
        raise Unrecoverable("clean-up")

    closed = []
    with monkeypatch.context() as patch:
        patch.setattr(stage._engine, "step", step)
        patch.setattr(stage._engine, "fail_all", fail_all)
        patch.setattr(stage, "close", lambda: closed.append(True))
        stage.inbox.put(whole("a", [1, 2, 3], greedy(5)))
        with pytest.raises(RuntimeError, match=message):
            stage.run()
    assert bool(closed) == ("device" in message), "a worker on another device may wait for the broken one"
    stage._engine.fail_all()
    ar.put(whole("b", [1, 2, 3], greedy(5)))
    ar.finish("b")
