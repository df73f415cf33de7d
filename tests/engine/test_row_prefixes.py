# SPDX-License-Identifier: Apache-2.0
"""A model that reads rows finds a prefix of equal rows in the prefix cache, and generates what it would without."""

import pytest
import torch

from tests.engine.feedback_models import register
from tests.engine.running import greedy, run
from tests.engine.test_feedback import ECHO_ENGINE_ARGS, check, make_prompt


@pytest.fixture(scope="module")
def engine(start_engine, tiny_qwen3):
    """With room for 12 blocks; prompts are cut into chunks of at most 64 tokens a step."""
    register()
    more = {"enable_prefix_caching": True, "max_model_len": 288, "num_gpu_blocks_override": 13}
    return start_engine(tiny_qwen3, **(ECHO_ENGINE_ARGS | more))


@pytest.fixture(autouse=True)
def without_cache(engine):
    assert engine.reset_prefix_cache()


def ask(engine, oracle, prompt, num_tokens=10):
    """The number of tokens in the cache."""
    (output,) = run(engine, [prompt], greedy(num_tokens))
    check(output, oracle, prompt, num_tokens)
    return output


def readable(length, seed, begin=None, **information):
    """A prompt that names its rows; `begin`: those of another one, before its own."""
    prompt = make_prompt(length, seed, feed=4, **information)
    rows = prompt["additional_information"]["prompt"]
    if begin is not None:
        rows = torch.cat((begin["additional_information"]["prompt"], rows))
    prompt["additional_information"]["prompt"] = rows
    return prompt | {"prompt_token_ids": [0] * len(rows), "token_information": ["prompt"]}


def test_a_later_turn_finds_the_rows_of_those_before(engine, oracle):
    first = readable(70, seed=1)
    second = readable(50, seed=2, begin=first)
    third = readable(10, seed=3, begin=second)
    for prompt, num_cached in ((first, 0), (second, 64), (third, 96), (first, 64)):
        assert ask(engine, oracle, prompt).num_cached_tokens == num_cached


@pytest.mark.parametrize(("changed", "num_cached"), [(0, 0), (31, 0), (32, 32), (64, 64)])
def test_a_row_that_differs(engine, oracle, changed, num_cached):
    prompt, other = readable(80, seed=1), readable(80, seed=1)
    other["additional_information"]["prompt"][changed] += 1e-6
    ask(engine, oracle, prompt)
    assert ask(engine, oracle, other).num_cached_tokens == num_cached


def test_positions_that_differ(engine, oracle):
    positions = torch.arange(80).expand(3, 80).contiguous()
    others = positions.clone()
    others[2, 40] += 1
    ask(engine, oracle, readable(80, seed=1, mrope_positions=positions))
    assert ask(engine, oracle, readable(80, seed=1, mrope_positions=others)).num_cached_tokens == 32
    assert ask(engine, oracle, readable(80, seed=1, mrope_positions=positions)).num_cached_tokens == 64


def test_generated_tokens_are_not_found_as_a_prompt(engine, oracle):
    """They were generated with input that no hash contains."""
    prompt = readable(64, seed=1)
    output = ask(engine, oracle, prompt, num_tokens=70)
    other = readable(70, seed=2, begin=prompt)
    other["prompt_token_ids"] = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)
    assert ask(engine, oracle, other).num_cached_tokens == 64


def test_a_prompt_that_does_not_name_its_rows_finds_nothing(engine, oracle):
    prompt = make_prompt(80, seed=1)
    for _ in range(2):
        assert ask(engine, oracle, prompt).num_cached_tokens == 0


def test_requests_that_preempt_each_other(engine, oracle):
    begin = readable(64, seed=1)
    ask(engine, oracle, begin)
    prompts = [readable(length, seed, begin) for seed, length in enumerate((40, 10, 60, 33), 2)]
    outputs = run(engine, prompts, greedy(60))
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, oracle, prompt, 60)


def test_a_name_of_no_tensor(engine):
    prompt = make_prompt(40, seed=1, voice="a") | {"token_information": ["voice"]}
    with pytest.raises(ValueError, match="token_information names 'voice', which is no tensor"):
        run(engine, [prompt], greedy(2))
    assert not engine.has_unfinished_requests()
