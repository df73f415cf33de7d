# SPDX-License-Identifier: Apache-2.0
"""A stage that caches prefixes hands on the rows of the whole prompt, those of tokens in the cache included."""

import pytest

from tests.engine.conftest import BLOCK_SIZE
from tests.engine.running import greedy, random_prompts, run, step_until_idle
from tests.engine.test_hidden_states import assert_like_oracle


@pytest.fixture(scope="module")
def engine(start_engine, tiny_qwen3):
    """With room for 15 blocks of 32 tokens; prompts are cut into chunks of at most 32 tokens a step."""
    return start_engine(
        tiny_qwen3,
        engine_output_type="latent",
        enable_prefix_caching=True,
        max_num_batched_tokens=BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        num_gpu_blocks_override=16,
    )


@pytest.fixture(autouse=True)
def without_cache(request):
    if "engine" in request.fixturenames:
        assert request.getfixturevalue("engine").reset_prefix_cache()


def ask(engine, prompt, num_tokens=10, **parameters):
    (output,) = run(engine, [{"prompt_token_ids": prompt}], greedy(num_tokens, **parameters))
    return output


def continued(prompt, output, seed, length=20):
    """The next turn of a conversation."""
    (more,) = random_prompts(length, seed=seed)
    return prompt + list(output.outputs[0].token_ids) + more


def test_each_turn_finds_the_turns_before_it_and_their_answers(engine, oracle):
    (prompt,) = random_prompts(70)
    num_before = 1
    for turn in range(4):
        output = ask(engine, prompt)
        assert_like_oracle(output, prompt, oracle)
        assert output.num_cached_tokens == (num_before - 1) // BLOCK_SIZE * BLOCK_SIZE  # All but the last token's row.
        num_before = len(prompt) + 10
        prompt = continued(prompt, output, seed=turn + 1)


def test_the_same_prompt_again_and_prompts_with_a_common_beginning(engine, oracle):
    first, other = random_prompts(96, 40)
    for prompt, num_cached in ((first, 0), (first, 64), (first[:64] + other, 64), (first[:40], 32), (other, 0)):
        output = ask(engine, prompt)
        assert output.num_cached_tokens == num_cached
        assert_like_oracle(output, prompt, oracle)


def test_requests_at_once(engine, oracle):
    (begin,) = random_prompts(64)
    ask(engine, [*begin, 5])
    prompts = [begin + more for more in random_prompts(3, 40, 1, seed=3)]
    outputs = run(engine, [{"prompt_token_ids": prompt} for prompt in prompts], greedy(12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 64
        assert_like_oracle(output, prompt, oracle)


def test_blocks_of_requests_for_text_alone_have_no_rows(engine, oracle):
    """They are computed once more for a request whose rows are read, and then are found."""
    (prompt,) = random_prompts(80)
    for reads_rows, num_cached in ((False, 0), (False, 64), (True, 0), (True, 64), (False, 64)):
        engine.add_request("0", {"prompt_token_ids": prompt}, greedy(4))
        if not reads_rows:
            engine.discard_rows("0", first=0)
        output = step_until_idle(engine)[-1]
        assert output.num_cached_tokens == num_cached
        if reads_rows:
            assert_like_oracle(output, prompt, oracle)
        else:
            assert output.multimodal_output == {}


def test_blocks_that_were_evicted(engine, oracle):
    (prompt,) = random_prompts(80)
    ask(engine, prompt)
    for other in random_prompts(300, 300, seed=9):
        assert_like_oracle(ask(engine, other), other, oracle)
    output = ask(engine, prompt)
    assert output.num_cached_tokens == 0
    assert_like_oracle(output, prompt, oracle)


def test_requests_that_preempt_each_other(engine, oracle):
    """15 blocks are too few for all of them; some lose theirs inside their prompts, after they found a part of them."""
    (begin,) = random_prompts(64)
    ask(engine, [*begin, 5])
    prompts = [begin + more for more in random_prompts(90, 40, 70, 61, 95, seed=4)]
    outputs = run(engine, [{"prompt_token_ids": prompt} for prompt in prompts], greedy(40))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_like_oracle(output, prompt, oracle)


def test_forced_preemption(engine, oracle):
    """Running requests lose their blocks, and the cache its own, while their prompts are computed and later."""
    (begin,) = random_prompts(64)
    ask(engine, [*begin, 5])
    prompts = [begin + more for more in random_prompts(90, 40, seed=4)]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(10))
    outputs, steps = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps in (1, 3, 12):
            assert engine.reset_prefix_cache(reset_running_requests=True)
    for index, prompt in enumerate(prompts):
        assert_like_oracle(outputs[str(index)], prompt, oracle)


def test_an_aborted_request_leaves_what_it_computed(engine, oracle):
    (prompt,) = random_prompts(96)
    engine.add_request("0", {"prompt_token_ids": prompt}, greedy(50))
    for _ in range(6):
        engine.step()
    engine.abort_request(["0"])
    output = ask(engine, prompt)
    assert output.num_cached_tokens == 64
    assert_like_oracle(output, prompt, oracle)


def test_other_information_is_another_prompt(engine):
    (prompt,) = random_prompts(70)
    for information, num_cached in (({"a": 1}, 0), ({"a": 2}, 0), ({"a": 1}, 64), (None, 0)):
        engine.add_request("0", {"prompt_token_ids": prompt, "additional_information": information}, greedy(2))
        assert step_until_idle(engine)[-1].num_cached_tokens == num_cached
