# SPDX-License-Identifier: Apache-2.0
"""The feedback runner, on a model whose loop is repeated in plain torch, with the emitted random draws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from tests.engine.feedback_models import ECHO, EchoStrategy, register
from tests.engine.running import greedy, run, step_until_idle
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.payloads import Guidance
from vllm_omni.testing.hf_oracle import HFTextOracle
from vllm_omni.worker.cpu_worker import CPUFeedbackARModelRunner

HIDDEN = 128
ECHO_ENGINE_ARGS: dict[str, Any] = {
    "engine_output_type": "draws",
    "model_arch": "EchoQwen3",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "enable_prompt_embeds": True,
    "max_model_len": 160,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 11,
}


@pytest.fixture(scope="session")
def echo_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    """Room for 10 blocks of 32 tokens, so that requests preempt each other."""
    register()
    return start_engine(tiny_qwen3, **ECHO_ENGINE_ARGS)


@pytest.fixture
def runner(echo_engine: OmniLLMEngine) -> CPUFeedbackARModelRunner:
    """A step drops the requests of other tests; a test of this file keeps none."""
    worker: Any = echo_engine.model_executor.driver_worker
    return worker.model_runner


@pytest.fixture
def strategy(runner: CPUFeedbackARModelRunner) -> EchoStrategy:
    assert isinstance(runner.strategy, EchoStrategy)
    runner.strategy.calls.clear()
    return runner.strategy


def make_prompt(length: int, seed: int, feed: int = 0, **information: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rows, feed_rows = (0.3 * torch.randn(n, HIDDEN, generator=generator) for n in (length, feed))
    return {
        "prompt_token_ids": [0] * length,
        "additional_information": {"prompt": rows, "feed": feed_rows, **information},
    }


@torch.no_grad()
def expected_tokens(model: Any, prompt: dict[str, Any], draws: torch.Tensor) -> list[int]:
    """The same loop; `draws` `[frames, 1]` are those that the engine used."""
    information = prompt["additional_information"]
    embeds, tokens = information["prompt"], []
    feed = torch.cat((information["feed"], torch.zeros(len(draws) + 1, HIDDEN)))
    for frame in range(len(draws) + 1):
        last = model.model(inputs_embeds=embeds[None]).last_hidden_state[0, -1]
        tokens.append(int(model.lm_head(last).argmax()))
        if frame < len(draws):
            row = model.get_input_embeddings()(torch.tensor(tokens[-1:])) + ECHO * (last + draws[frame])
            embeds = torch.cat((embeds, row + feed[frame]))
    return tokens


def check(output: Any, oracle: HFTextOracle, prompt: dict[str, Any], num_tokens: int) -> None:
    draws = output.multimodal_output["draw"]
    assert draws.shape == (num_tokens - 1, 1)
    assert list(output.outputs[0].token_ids) == expected_tokens(oracle.model, prompt, draws)


def step(engine: OmniLLMEngine, outputs: dict[str, Any]) -> None:
    outputs |= {output.request_id: output for output in engine.step()}  # type: ignore[misc]


def assert_nothing_is_left(engine: OmniLLMEngine, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy) -> None:
    engine.engine_core.get_output()  # what has ended is dropped with the next step
    assert (len(runner.slots), runner.omni_info, runner.open_inputs, runner.requests) == (0, {}, set(), {})
    assert strategy.prompts == {}


def test_requests_alone_and_together(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    """Prompts longer than a step, and more requests than there is memory for."""
    prompts = [make_prompt(n, seed, feed=9) for seed, n in enumerate((11, 90, 70, 80, 60, 75, 85))]
    (alone,) = run(echo_engine, prompts[:1], greedy(9))
    check(alone, oracle, prompts[0], 9)
    assert strategy.calls == [("feed_back", 1)] * 8
    for prompt, output in zip(prompts, run(echo_engine, prompts, greedy(40)), strict=True):
        check(output, oracle, prompt, 40)
    assert any(name == "replay" for name, _ in strategy.calls), "no request was preempted"
    assert max(count for name, count in strategy.calls if name == "feed_back") > 1
    assert sum(count for name, count in strategy.calls if name == "feed_back") == 8 + 7 * 39, "a token was fed twice"
    assert_nothing_is_left(echo_engine, runner, strategy)


def test_forced_preemptions_inside_prompt_and_answer(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    prompts = {name: make_prompt(n, n, feed=30) for name, n in (("long", 100), ("short", 20))}
    for name, prompt in prompts.items():
        echo_engine.add_request(name, prompt, greedy(12))
    outputs: dict[str, Any] = {}
    for count in range(100):
        if count in (1, 5, 11):
            assert echo_engine.reset_prefix_cache(reset_running_requests=True)
        if not echo_engine.has_unfinished_requests():
            break
        step(echo_engine, outputs)
    for name, prompt in prompts.items():
        check(outputs[name], oracle, prompt, 12)
    assert_nothing_is_left(echo_engine, runner, strategy)


def test_input_in_pieces_while_others_run_and_blocks_are_taken(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    prompt, other = make_prompt(40, 1, feed=11), make_prompt(30, 2, feed=3)
    feed = prompt["additional_information"]["feed"]
    first = {**prompt, "additional_information": {**prompt["additional_information"], "feed": feed[:2]}}
    echo_engine.add_request("pieces", first, greedy(16))
    echo_engine.await_input("pieces", 40 + 2)
    echo_engine.add_request("whole", other, greedy(30))
    outputs: dict[str, Any] = {}
    for _ in range(8):
        step(echo_engine, outputs)
    assert runner.slots.num_frames[runner.slots[next(iter(runner.open_inputs))]] == 2, "it went on without input"
    assert echo_engine.reset_prefix_cache(reset_running_requests=True)
    for start, stop in ((2, 3), (3, 3), (3, 8), (8, 11)):
        echo_engine.add_input("pieces", {"feed": feed[start:stop]}, 40 + stop, is_last=False)
        if start != 3:
            step(echo_engine, outputs)
    echo_engine.add_input("pieces", {}, None, is_last=True)
    while echo_engine.has_unfinished_requests():
        step(echo_engine, outputs)
    check(outputs["pieces"], oracle, prompt, 16)
    check(outputs["whole"], oracle, other, 30)
    assert_nothing_is_left(echo_engine, runner, strategy)


def test_slots_are_free_as_soon_as_a_request_has_ended_however_it_did(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    prompts = {name: make_prompt(10, seed) for seed, name in enumerate("abc")}
    for name, prompt in prompts.items():
        echo_engine.add_request(name, prompt, greedy(20))
    outputs: dict[str, Any] = {}
    for _ in range(5):
        step(echo_engine, outputs)
    assert sorted(strategy.prompts) == [0, 1, 2]
    echo_engine.abort_request(["b"])
    echo_engine.add_request("d", make_prompt(7, 9), greedy(3))
    step(echo_engine, outputs)
    assert torch.equal(strategy.prompts[1], make_prompt(7, 9)["additional_information"]["prompt"])
    while echo_engine.has_unfinished_requests():
        step(echo_engine, outputs)
    for name in "ac":
        check(outputs[name], oracle, prompts[name], 20)
    check(outputs["d"], oracle, make_prompt(7, 9), 3)
    assert_nothing_is_left(echo_engine, runner, strategy)


@pytest.mark.parametrize("bad", [{"refuse": True}, {"raise_at": 3}])
def test_a_step_that_raises_leaves_no_slot_taken(
    bad: dict[str, Any],
    echo_engine: OmniLLMEngine,
    oracle: HFTextOracle,
    runner: CPUFeedbackARModelRunner,
    strategy: EchoStrategy,
) -> None:
    echo_engine.add_request("good", make_prompt(12, 1), greedy(8))
    echo_engine.add_request("bad", make_prompt(9, 2, **bad), greedy(8))
    with pytest.raises(RuntimeError, match="told to"):
        step_until_idle(echo_engine)
    assert echo_engine.recover() == []
    echo_engine.abort_request(["bad"])
    (output,) = step_until_idle(echo_engine)
    check(output, oracle, make_prompt(12, 1), 8)
    assert_nothing_is_left(echo_engine, runner, strategy)


@pytest.mark.parametrize(
    "place", ["strategy.feed_back", "strategy.extend", "_model_forward", "strategy.save_hidden_states", "_sample"]
)
@pytest.mark.parametrize("num_good_calls", [0, 1, 5])
def test_frames_of_a_step_that_raises_are_made_and_leave_once(
    place: str,
    num_good_calls: int,
    echo_engine: OmniLLMEngine,
    oracle: HFTextOracle,
    runner: CPUFeedbackARModelRunner,
    strategy: EchoStrategy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it raises: before, while and after the frame is made; the frames are those that the tokens came from."""
    prompts = [make_prompt(100, 3, feed=12), make_prompt(20, 4, feed=30)]
    feed = prompts[0]["additional_information"]["feed"]
    first = {**prompts[0], "additional_information": {**prompts[0]["additional_information"], "feed": feed[:2]}}
    echo_engine.add_request("pieces", first, greedy(16, output_kind=RequestOutputKind.DELTA))
    echo_engine.await_input("pieces", 100 + 2)
    echo_engine.add_request("whole", prompts[1], greedy(20, output_kind=RequestOutputKind.DELTA))
    target: Any = strategy if "." in place else runner
    name = place.rpartition(".")[2]
    method, calls = getattr(target, name), iter(range(100))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == num_good_calls:
            raise RuntimeError("broken")
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, broken)
    outputs: dict[str, list[Any]] = {"pieces": [], "whole": []}
    num_raised, start = 0, 2
    while echo_engine.has_unfinished_requests():
        if start < 12:
            echo_engine.add_input("pieces", {"feed": feed[start : start + 1]}, 100 + start + 1, is_last=start == 11)
            start += 1
        try:
            for output in echo_engine.step():
                outputs[output.request_id].append(output)
        except RuntimeError:
            num_raised += 1
            assert echo_engine.recover() == []
    assert num_raised == 1
    for prompt, parts, num_tokens in zip(prompts, outputs.values(), (16, 20), strict=True):
        tokens = [token for part in parts for token in part.outputs[0].token_ids]
        draws = torch.cat([part.multimodal_output["draw"] for part in parts if part.multimodal_output])
        assert (len(tokens), len(draws)) == (num_tokens, num_tokens - 1)
        assert tokens == expected_tokens(oracle.model, prompt, draws)
    assert_nothing_is_left(echo_engine, runner, strategy)


def test_one_token_emits_nothing(echo_engine: OmniLLMEngine) -> None:
    (output,) = run(echo_engine, [make_prompt(5, 1)], greedy(1))
    assert output.multimodal_output == {}  # type: ignore[attr-defined]


ENDING = greedy(20, ignore_eos=False)


def ending_prompts() -> dict[str, dict[str, Any]]:
    """By the frame that ends them: some alone in their step, some together, one never."""
    return {str(last): make_prompt(5 + last, last, feed=40, last_frame=last) for last in (0, 3, 4, 17)} | {
        "never": make_prompt(30, 9, feed=40)
    }


def check_ends(outputs: dict[str, Any], oracle: HFTextOracle, prompts: dict[str, dict[str, Any]]) -> None:
    """The row of the last frame has left; what was sampled from it has not."""
    for name, prompt in prompts.items():
        output, num_frames = outputs[name], 19 if name == "never" else int(name) + 1
        draws = output.multimodal_output["draw"]
        tokens = list(output.outputs[0].token_ids)
        assert draws.shape == (num_frames, 1)
        assert tokens == expected_tokens(oracle.model, prompt, draws)[: len(tokens)]
        assert len(tokens) == (20 if name == "never" else num_frames)
        assert output.outputs[0].finish_reason == ("length" if name == "never" else "stop")


def test_the_model_ends_requests(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    prompts = ending_prompts()
    outputs = dict(zip(prompts, run(echo_engine, list(prompts.values()), ENDING), strict=True))
    check_ends(outputs, oracle, prompts)
    assert_nothing_is_left(echo_engine, runner, strategy)


def test_the_model_ends_requests_that_are_preempted(
    echo_engine: OmniLLMEngine, oracle: HFTextOracle, runner: CPUFeedbackARModelRunner, strategy: EchoStrategy
) -> None:
    """Before, at and after each end; a frame that ends a request in a step that raises ends it in the next."""
    prompts = ending_prompts()
    for name, prompt in prompts.items():
        echo_engine.add_request(name, prompt, ENDING)
    outputs: dict[str, Any] = {}
    for count in range(200):
        if count in (2, 5, 6, 12):
            assert echo_engine.reset_prefix_cache(reset_running_requests=True)
        if not echo_engine.has_unfinished_requests():
            break
        step(echo_engine, outputs)
    check_ends(outputs, oracle, prompts)
    assert any(name == "replay" for name, _ in strategy.calls)
    assert_nothing_is_left(echo_engine, runner, strategy)


@pytest.mark.parametrize("num_good_calls", [1, 4, 5])
def test_an_end_in_a_step_that_raises_is_not_lost(
    num_good_calls: int,
    echo_engine: OmniLLMEngine,
    oracle: HFTextOracle,
    runner: CPUFeedbackARModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ending_prompts()
    method, calls = runner._sample, iter(range(100))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == num_good_calls:
            raise RuntimeError("broken")
        return method(*args, **kwargs)

    monkeypatch.setattr(runner, "_sample", broken)
    for name, prompt in prompts.items():
        echo_engine.add_request(name, prompt, ENDING)
    outputs: dict[str, Any] = {}
    while echo_engine.has_unfinished_requests():
        try:
            step(echo_engine, outputs)
        except RuntimeError:
            assert echo_engine.recover() == []
    check_ends(outputs, oracle, prompts)


@pytest.mark.parametrize("params", [{"min_tokens": 8}, {"ignore_eos": True}])
def test_a_request_can_go_on_after_its_end(params: dict[str, Any], echo_engine: OmniLLMEngine) -> None:
    prompt = make_prompt(5, 1, feed=9, last_frame=3)
    (output,) = run(echo_engine, [prompt], greedy(12, **{"ignore_eos": False} | params))
    assert len(output.outputs[0].token_ids) == 12


def test_first_outputs_leave_once_with_the_first_token(echo_engine: OmniLLMEngine, oracle: HFTextOracle) -> None:
    """Also of a prompt of several steps, and of a request that is preempted later."""
    prompts = {str(n): make_prompt(n, n, feed=9, first=-torch.arange(1.0, n)[:, None]) for n in (4, 90)}
    for name, prompt in prompts.items():
        echo_engine.add_request(name, prompt, greedy(9, output_kind=RequestOutputKind.DELTA))
    received: dict[str, list[Any]] = {name: [] for name in prompts}
    count = 0
    while echo_engine.has_unfinished_requests():
        for output in echo_engine.step():
            received[output.request_id].append(output)
        count += 1
        if count in (1, 6):
            assert echo_engine.reset_prefix_cache(reset_running_requests=True)
    for name, prompt in prompts.items():
        first = received[name][0].multimodal_output["draw"]
        assert torch.equal(first, prompt["additional_information"]["first"])
        draws = torch.cat([part.multimodal_output["draw"] for part in received[name][1:]])
        tokens = [token for part in received[name] for token in part.outputs[0].token_ids]
        assert tokens == expected_tokens(oracle.model, prompt, draws)


def test_guidance_is_refused(echo_engine: OmniLLMEngine) -> None:
    echo_engine.add_request("a", {**make_prompt(5, 0), "guidance": Guidance([0], 2.0)}, greedy(4))
    with pytest.raises(NotImplementedError, match="feedback strategy has no guidance"):
        echo_engine.step()
    echo_engine.abort_request(["a"])
    assert echo_engine.recover() == [] and step_until_idle(echo_engine) == []
