# SPDX-License-Identifier: Apache-2.0
"""A request that makes a step raise fails alone; a broken engine ends its stage."""

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
    preprocessed,
    whole,
)
from vllm_omni.inputs import StageInput
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox
from vllm_omni.stage.engines.llm import MAX_RETRIES, LLMStageEngine
from vllm_omni.stage.engines.llm_request import ARRequest


def bad(request_id: str, prompt: list[int], raise_at: int, max_tokens: int = 20) -> NewRequest:
    request = whole(request_id, prompt, greedy(max_tokens))
    request.stage_input = StageInput(prompt_token_ids=prompt, additional_information={"raise_at": raise_at})
    return request


def alone(running: RunningEngine, *requests: NewRequest) -> list[StageOutput]:
    """Their outputs when each runs alone."""
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
def test_only_the_request_at_fault_fails(ar, raise_at):
    prompts = random_prompts(20, 11, 70)
    good = [whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25))]
    expected = alone(ar, *good)
    ar.put(good[0], bad("b", prompts[1], raise_at), good[1])
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert f"told to raise at {raise_at}" in ar.error("b").error and "_extra" in ar.error("b").traceback
    assert 2 in ar.counter.batch_sizes  # The others do not stay alone: they share steps again.
    assert_nothing_is_left(ar)


def test_requests_that_were_preprocessed_by_their_caller(ar):
    prompts = random_prompts(20, 11, 70)
    expected = alone(ar, whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25)))
    good = [preprocessed(ar, "a", prompts[0], greedy(25)), preprocessed(ar, "c", prompts[2], greedy(25))]
    ar.put(good[0], bad("b", prompts[1], 15), good[1])
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert "raise at 15" in ar.error("b").error


@pytest.mark.slow
def test_several_requests_at_fault(ar):
    prompts = random_prompts(20, 11, 30, 12)
    good = [whole("a", prompts[0], greedy(25)), whole("c", prompts[2], greedy(25))]
    expected = alone(ar, *good)
    ar.put(good[0], bad("b", prompts[1], 15), good[1], bad("d", prompts[3], 13))
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert "raise at 15" in ar.error("b").error and "raise at 13" in ar.error("d").error
    assert_nothing_is_left(ar)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        pytest.param({"temperature": 1.0, "seed": 3, "logprobs": 1}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0, "seed": 3, "n": 2}, marks=pytest.mark.slow),
        pytest.param({"stop": ["never found"]}, marks=pytest.mark.slow),
        pytest.param({"stream_interval": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_streams_continue_at_their_position(ar, parameters):
    """Text, tokens, logprobs and rows: nothing is sent twice, and the rest equals that without the failure."""
    params = greedy(25, **parameters)
    prompts = random_prompts(20, 11, 70)
    expected = alone(ar, whole("a", prompts[0], params), whole("c", prompts[2], params))
    expected_pieces = {}
    for request_id, prompt in (("a", prompts[0]), ("c", prompts[2])):
        ar.put(whole(request_id, prompt, params, streams_output=True))
        ar.finish(request_id)
        expected_pieces[request_id] = len(ar.items.pop(request_id))
    ar.put(
        whole("a", prompts[0], params, streams_output=True),
        bad("b", prompts[1], 15),
        whole("c", prompts[2], params, streams_output=True),
    )
    for output, one in zip(ar.finish("a", "c"), expected, strict=True):
        assert_equal(output, one)
    assert {name: len(ar.items[name]) for name in "ac"} == expected_pieces
    assert "raise at 15" in ar.error("b").error
    assert_nothing_is_left(ar)


def test_streams_with_input_in_windows_continue(ar):
    """Chunks that arrived before, during and after the step."""
    feed = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)) * 0.2
    prompts = random_prompts(20, 11)
    (expected,) = alone(ar, whole("a", prompts[0], greedy(25), feed))
    start = first_part("a", prompts[0], greedy(25), feed, 2)
    start.streams_output = True
    ar.put(start)
    ar.wait_asleep()
    ar.put(bad("b", prompts[1], 11), next_part("a", prompts[0], feed, 2, 4), next_part("a", prompts[0], feed, 4, 9))
    ar.wait_asleep()
    assert "raise at 11" in ar.error("b").error and len(ar.items["a"]) == 10
    ar.put(next_part("a", prompts[0], feed, 9, 16, is_last=True))
    assert_equal(*ar.finish("a"), expected)
    assert_nothing_is_left(ar)


@pytest.mark.slow
def test_a_long_stream_survives_any_number_of_requests_at_fault(ar):
    feed = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)) * 0.2
    prompts = random_prompts(20, 11)
    (expected,) = alone(ar, whole("a", prompts[0], greedy(25), feed))
    start = first_part("a", prompts[0], greedy(25), feed, 1)
    start.streams_output = True
    ar.put(start)
    ar.wait_asleep()
    for index in range(MAX_RETRIES + 2):
        rows = 1 + 3 * index, 4 + 3 * index
        ar.put(bad(f"b{index}", prompts[1], 11), next_part("a", prompts[0], feed, *rows))
        ar.wait_asleep()
        assert "raise at 11" in ar.error(f"b{index}").error
    ar.put(chunk("a", is_last=True))
    assert_equal(*ar.finish("a"), expected)
    assert_nothing_is_left(ar)


def test_an_error_of_the_output_code_is_not_an_invalid_request(ar, monkeypatch):
    """And it fails only one request."""
    take = ARRequest.take

    def broken(request, output):
        if request.request_id == "b" and ar.counter.batch_sizes[-1] == 2:
            raise ValueError("ours")
        return take(request, output)

    monkeypatch.setattr(ARRequest, "take", broken)
    prompts = random_prompts(20, 11)
    ar.put(
        whole("a", prompts[0], greedy(9), streams_output=True), whole("b", prompts[1], greedy(9), streams_output=True)
    )
    (output,) = ar.finish("a")
    assert len(output.completions[0].token_ids) == 9
    assert "ValueError: ours" in ar.error("b").error and not ar.error("b").invalid
    assert_nothing_is_left(ar)


def test_held_and_waiting_requests_continue_with_their_chunks(ar):
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


@pytest.mark.slow
def test_suspects_do_not_wait_for_one_that_is_held(ar):
    """`held` is also a suspect, and gets no input: the others finish nevertheless."""
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


@pytest.mark.slow
def test_an_error_that_only_a_batch_raises_ends(ar, runner, monkeypatch):
    """Alone no request raises, so they share steps again, until one reaches `MAX_RETRIES`."""
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
def test_an_error_outside_of_the_model(ar, monkeypatch, place):
    """Before a step there is no suspect, and after it the tokens are lost."""
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
    for request_id in ("a", "b"):
        assert "broken" in ar.error(request_id).error and not ar.error(request_id).invalid
    assert_nothing_is_left(ar)


class Unrecoverable(RuntimeError):
    pass


BROKEN = torch.AcceleratorError("device-side assert")
# The error that vLLM's executor for several devices raises; checked by `tests/worker/test_gpu_worker.py`.
BROKEN_ELSEWHERE = RuntimeError("Worker failed with error 'the device cannot be used any more: device-side assert'")


@pytest.mark.parametrize(
    ("raised", "message"),
    [(BROKEN, "device-side assert"), (BROKEN_ELSEWHERE, "device-side assert"), (RuntimeError("step"), "clean-up")],
    ids=["device", "another worker's device", "clean-up"],
)
def test_a_broken_engine_ends_its_stage(ar, monkeypatch, raised, message):
    """With a second stage engine on the running `OmniLLMEngine`, so that the thread of the first one survives."""
    stage = LLMStageEngine(Outbox(), 1, str(ar.engine._engine.model_config.model), "ar", {})
    stage._engine = ar.engine._engine

    def step():
        raise raised

    def recover():
        raise Unrecoverable("clean-up")

    closed = []
    with monkeypatch.context() as patch:
        patch.setattr(stage._engine, "step", step)
        patch.setattr(stage._engine, "recover", recover)
        patch.setattr(stage, "close", lambda: closed.append(True))
        stage.inbox.put(whole("a", [1, 2, 3], greedy(5)))
        with pytest.raises(RuntimeError, match=message):
            stage.run()
    assert bool(closed) == ("device" in message), "a worker on another device may wait for the broken one"
    stage._engine.abort_request(["a"])
    ar.put(whole("b", [1, 2, 3], greedy(5)))
    ar.finish("b")
