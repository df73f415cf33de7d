# SPDX-License-Identifier: Apache-2.0
"""A stage that emits text is plain vLLM: nothing is captured, nothing is paid for."""

import pytest
import torch

from tests.engine.running import greedy, random_prompts, run, step_until_idle


@pytest.fixture
def runner(text_engine):
    return text_engine.model_executor.driver_worker.model_runner


def test_same_tokens_and_no_work(text_engine, latent_engine, runner, monkeypatch):
    def refuse():
        raise AssertionError("the requests of a step are of no interest here")

    monkeypatch.setattr(runner, "_make_spans", refuse)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(5, 70, 33)]
    outputs = run(text_engine, prompts, greedy(12))
    assert [output.multimodal_output for output in outputs] == [{}] * 3
    expected = run(latent_engine, prompts, greedy(12))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_prefix_caching_stays_on(text_engine):
    (prompt,) = random_prompts(100, seed=5)
    run(text_engine, [{"prompt_token_ids": prompt}], greedy(2))
    (output,) = run(text_engine, [{"prompt_token_ids": prompt}], greedy(2))
    assert output.num_cached_tokens == 96


def test_no_request_waits_for_a_compiler(text_engine):
    """What vLLM compiles when a request needs it first."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(5, 7)]
    for params in (greedy(3, logprobs=2, prompt_logprobs=1), greedy(3, temperature=1.0)):
        assert len(run(text_engine, prompts, params)) == 2
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.parametrize("engine_name", ["text_engine", "latent_engine"])
def test_stop_strings(engine_name, request, oracle):
    """Found in the text, so by the output processor; the rows end with the tokens."""
    engine = request.getfixturevalue(engine_name)
    (prompt,) = random_prompts(6)
    (whole,) = run(engine, [{"prompt_token_ids": prompt}], greedy(12))
    text = oracle.tokenizer.decode(whole.outputs[0].token_ids[:6])
    engine.add_request("0", {"prompt_token_ids": prompt}, greedy(12, stop=[text[-2:]]))
    (output,) = step_until_idle(engine)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and len(completion.token_ids) < 12
    if engine_name == "latent_engine":
        assert len(output.multimodal_output["hidden"]) == 6 + len(completion.token_ids) - 1


class TestClosing:
    def test_others_continue_and_the_closed_engine_raises(self, start_engine, text_engine, tiny_qwen3):
        engine = start_engine(tiny_qwen3, block_size=32)
        (prompt,) = random_prompts(6)
        engine.add_request("0", {"prompt_token_ids": prompt}, greedy(5))
        engine.step()
        engine.close()
        engine.close()
        for use in (engine.step, lambda: engine.add_request("1", {"prompt_token_ids": prompt}, greedy(5))):
            with pytest.raises(RuntimeError, match="closed"):
                use()
        (output,) = run(text_engine, [{"prompt_token_ids": prompt}], greedy(5))
        assert len(output.outputs[0].token_ids) == 5

    def test_closing_one_engine_does_not_affect_others(self, text_engine, tiny_qwen3):
        from vllm_omni.engine.engine_args import create_engine_args
        from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

        arguments = create_engine_args(
            str(tiny_qwen3), max_model_len=64, kv_cache_memory_bytes=1 << 20, enforce_eager=True
        )
        engine = OmniLLMEngine.from_omni_engine_args(arguments)
        engine.engine_core._finalizer()  # as the garbage collector would
        (output,) = run(text_engine, [{"prompt_token_ids": [1, 2, 3]}], greedy(5))
        assert len(output.outputs[0].token_ids) == 5
