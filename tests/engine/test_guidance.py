# SPDX-License-Identifier: Apache-2.0
"""Guided requests on real engines, against a loop over HF's model: whatever else runs, their tokens are equal."""

import functools

import pytest
import torch
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from tests.engine.conftest import BLOCK_SIZE
from tests.engine.running import greedy, random_prompts, run, step_until_idle
from vllm_omni.errors import InvalidRequestError
from vllm_omni.payloads import Guidance

NUM_TOKENS = 24
SCALE = 3.0
# Of each request and its twin: equal lengths, one of them much longer, and one token only.
LENGTHS = ((20, 20), (9, 70), (70, 3), (1, 1), (33, 40), (64, 31))


@pytest.fixture(scope="module")
def pairs():
    prompts = random_prompts(*(length for pair in LENGTHS for length in pair), seed=1)
    return list(zip(prompts[::2], prompts[1::2], strict=True))


@pytest.fixture(scope="module")
def expected(oracle):
    @functools.cache
    def guided(prompt, unconditional, num_tokens, scale=SCALE):
        """Greedy tokens, computed whole in each step."""
        tokens = []
        for _ in range(num_tokens):
            cond, uncond = (last_logits(oracle, [*start, *tokens]) for start in (prompt, unconditional))
            tokens.append(int((uncond + scale * (cond - uncond)).argmax()))
        return tokens

    return lambda prompt, unconditional, num_tokens=NUM_TOKENS: guided(tuple(prompt), tuple(unconditional), num_tokens)


@torch.no_grad()
def last_logits(oracle, token_ids):
    return oracle.model(torch.tensor([token_ids])).logits[0, -1]


@pytest.fixture(scope="module")
def tight_engine(start_engine, tiny_qwen3):
    """Chunks of at most 24 tokens, and room for 12 blocks: all pairs together preempt each other."""
    return start_engine(
        tiny_qwen3,
        block_size=BLOCK_SIZE,
        max_model_len=128,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=13,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


def guided_prompt(prompt, unconditional, scale=SCALE):
    return {"prompt_token_ids": prompt, "guidance": Guidance(unconditional, scale)}


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def is_empty(engine):
    scheduler = engine._scheduler
    return not (
        scheduler.requests or scheduler.running or scheduler.waiting or scheduler._twins or engine.kv_blocks()[0]
    )


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_alone(text_engine, pairs, expected, index):
    (output,) = run(text_engine, [guided_prompt(*pairs[index])], greedy(NUM_TOKENS))
    assert output.outputs[0].token_ids == expected(*pairs[index])
    assert output.prompt_token_ids == pairs[index][0] and output.outputs[0].finish_reason == "length"
    assert is_empty(text_engine)


def test_guidance_changes_tokens(pairs, expected, oracle, text_engine):
    """Or the tests above would prove nothing."""
    plain = run(text_engine, [{"prompt_token_ids": prompt} for prompt, _ in pairs], greedy(NUM_TOKENS))
    assert all(tokens != expected(*pair) for tokens, pair in zip(tokens_of(plain), pairs, strict=True))


def test_scale_1_is_no_guidance(text_engine, pairs):
    prompt, unconditional = pairs[0]
    guided, plain = run(
        text_engine, [guided_prompt(prompt, unconditional, 1.0), {"prompt_token_ids": prompt}], greedy(NUM_TOKENS)
    )
    assert guided.outputs[0].token_ids == plain.outputs[0].token_ids


def mixed(pairs):
    """Each pair, and its prompt without guidance."""
    return [each for pair in pairs for each in (guided_prompt(*pair), {"prompt_token_ids": pair[0]})]


def test_in_a_batch_with_others(text_engine, pairs, expected):
    alone = [run(text_engine, [{"prompt_token_ids": prompt}], greedy(NUM_TOKENS))[0] for prompt, _ in pairs]
    outputs = run(text_engine, mixed(pairs), greedy(NUM_TOKENS))  # eight sequences at once
    assert tokens_of(outputs[::2]) == [expected(*pair) for pair in pairs]
    assert tokens_of(outputs[1::2]) == tokens_of(alone)
    assert is_empty(text_engine)


def test_chunked_and_preempted(tight_engine, pairs, expected, monkeypatch):
    preempted = []
    scheduler = tight_engine._scheduler
    original = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (preempted.append(r), original(r, *a, **k)))
    outputs = run(tight_engine, mixed(pairs), greedy(NUM_TOKENS))
    assert tokens_of(outputs[::2]) == [expected(*pair) for pair in pairs]
    twins = [request for request in preempted if request.is_unconditional]
    assert twins and len(preempted) > len(twins)
    assert is_empty(tight_engine)


def test_pairs_alone_in_a_full_cache(tight_engine, pairs, expected):
    """They wait for each other's blocks and for nothing else."""
    many = [pair for pair in pairs if sum(map(len, pair)) > 60] * 3
    outputs = run(tight_engine, [guided_prompt(*pair) for pair in many], greedy(NUM_TOKENS))
    assert tokens_of(outputs) == [expected(*pair) for pair in many]
    assert is_empty(tight_engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9])
def test_aborted(tight_engine, pairs, expected, num_steps):
    for index, pair in enumerate(pairs):
        tight_engine.add_request(str(index), guided_prompt(*pair), greedy(NUM_TOKENS))
    outputs = [output for _ in range(num_steps) for output in tight_engine.step()]
    tight_engine.abort_request(["0", "2", "4"])
    outputs += step_until_idle(tight_engine)
    finished = {int(output.request_id): output.outputs[0].token_ids for output in outputs if output.finished}
    assert finished == {index: expected(*pairs[index]) for index in (1, 3, 5)}
    tight_engine.step()
    assert is_empty(tight_engine)


def test_both_stop_at_a_token(text_engine, pairs, expected):
    tokens = expected(*pairs[1])
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    (output,) = run(
        text_engine, [guided_prompt(*pairs[1])], greedy(NUM_TOKENS, ignore_eos=False, stop_token_ids=[stop])
    )
    assert output.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].stop_reason == stop and is_empty(text_engine)


def test_seeds_and_several_samples(tight_engine, pairs):
    """A seed's tokens are those of the request alone, however often its last row is computed again."""
    params = greedy(NUM_TOKENS, temperature=1.0, seed=5)
    alone = [run(tight_engine, [guided_prompt(*pair)], params)[0] for pair in pairs]
    outputs = run(tight_engine, mixed(pairs), params)
    assert tokens_of(outputs[::2]) == tokens_of(alone)
    (several,) = run(tight_engine, [guided_prompt(*pairs[0])], greedy(NUM_TOKENS, temperature=1.0, seed=5, n=2))
    first, second = (completion.token_ids for completion in several.outputs)
    assert first != second and is_empty(tight_engine)


def test_rows_leave_once(latent_engine, pairs, oracle, expected):
    """The hidden states of the request's own sequence, each row once, though rows are computed again."""
    outputs = run(latent_engine, [guided_prompt(*pair) for pair in pairs], greedy(NUM_TOKENS))
    for output, pair in zip(outputs, pairs, strict=True):
        assert output.outputs[0].token_ids == expected(*pair)
        sequence = [*pair[0], *expected(*pair)[:-1]]
        with torch.no_grad():
            rows = oracle.model.model(torch.tensor([sequence])).last_hidden_state[0]
        torch.testing.assert_close(output.multimodal_output["hidden"], rows, atol=1e-4, rtol=1e-4)


def test_prefix_cache(start_engine, tiny_qwen3, pairs, expected):
    engine = start_engine(tiny_qwen3, block_size=BLOCK_SIZE, enable_prefix_caching=True, async_scheduling=False)
    prompts = [guided_prompt(*pair) for pair in pairs]
    first, second = (tokens_of(run(engine, prompts, greedy(NUM_TOKENS))) for _ in range(2))
    assert first == second == [expected(*pair) for pair in pairs]


def test_nobody_sees_the_twin(text_engine, pairs, monkeypatch):
    steps = []
    text_engine.watch_steps(lambda step: None, steps.append)
    text_engine.add_request("a", guided_prompt(*pairs[0]), greedy(4))
    text_engine.step()
    assert steps[-1].num_sequences == 1 and list(steps[-1].num_computed_tokens) == ["a"]
    scheduler = text_engine._scheduler
    assert len(scheduler.running) == 2
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "log_stats", True)
        patch.setattr(scheduler.kv_cache_manager, "log_stats", True)
        patch.setattr(scheduler.kv_cache_manager, "prefix_cache_stats", PrefixCacheStats())
        stats = scheduler.make_stats()
    assert isinstance(stats, SchedulerStats) and (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
    text_engine.abort_request(["a"])
    text_engine.step()
    assert is_empty(text_engine)


@pytest.mark.parametrize(
    ("unconditional", "scale", "message"),
    [
        ([], 2.0, "guidance.prompt_token_ids has 0 ids; max_model_len is 128"),
        ([1] * 128, 2.0, "guidance.prompt_token_ids has 128 ids"),
        ([1, -1], 2.0, "guidance.prompt_token_ids has ids that are not in"),
        ([1], float("nan"), "guidance.scale must be a finite number"),
    ],
)
def test_wrong_guidance_is_refused(tight_engine, unconditional, scale, message):
    with pytest.raises(InvalidRequestError, match=message):
        tight_engine.add_request("a", guided_prompt([1], unconditional, scale), greedy(4))
    assert is_empty(tight_engine)


def test_what_never_fits_is_refused(start_engine, tiny_qwen3):
    engine = start_engine(
        tiny_qwen3, block_size=BLOCK_SIZE, max_model_len=128, num_gpu_blocks_override=6, async_scheduling=False
    )
    with pytest.raises(InvalidRequestError, match="it takes 8 blocks of the KV cache, which has 5: lower max_tokens"):
        engine.add_request("a", guided_prompt([1], [1]), greedy(127))
    assert is_empty(engine)


def test_the_twin_bounds_the_length(tight_engine):
    (output,) = run(tight_engine, [guided_prompt([5], [6] * 120)], greedy(100))
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_input_in_pieces_is_refused(tight_engine):
    tight_engine.add_request("a", guided_prompt([5], [6]), greedy(4))
    with pytest.raises(InvalidRequestError, match="needs its whole input at once"):
        tight_engine.await_input("a", 1)
    tight_engine.abort_request(["a"])
    step_until_idle(tight_engine)


def test_others_go_on_after_a_step_that_raised(tight_engine, pairs, expected, monkeypatch):
    """Both sequences are computed again, and no token twice."""
    for index, pair in enumerate(pairs[:3]):
        tight_engine.add_request(str(index), guided_prompt(*pair), greedy(NUM_TOKENS))
    outputs = [output for _ in range(12) for output in tight_engine.step()]
    with monkeypatch.context() as patch:
        patch.setattr(tight_engine._scheduler, "update_from_output", lambda *_: 1 / 0)
        runner = tight_engine.model_executor.driver_worker.worker.model_runner
        patch.setattr(runner, "_sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tight_engine.step()
    assert tight_engine.recover() == []
    tight_engine.isolate("1", 40)
    outputs += step_until_idle(tight_engine)
    finished = {int(output.request_id): output.outputs[0].token_ids for output in outputs if output.finished}
    assert finished == {index: expected(*pairs[index]) for index in range(3)}
    assert is_empty(tight_engine)
