# SPDX-License-Identifier: Apache-2.0
"""Hidden states of prompt and generated tokens are those of transformers, whatever happens to the requests."""

import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from tests.engine.running import greedy, random_prompts, run, step_until_idle
from vllm_omni.payloads import PromptEmbedsPayload

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@torch.no_grad()
def assert_rows(hidden, prompt, token_ids, oracle):
    """One row for each token that was fed, as transformers computes them all at once; returns its greedy tokens."""
    expected = oracle.model.model(torch.tensor([prompt + list(token_ids[:-1])])).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, **TOLERANCE)
    return oracle.model.lm_head(expected[len(prompt) - 1 :]).argmax(-1).tolist()


def assert_like_oracle(output, prompt, oracle):
    token_ids = output.outputs[0].token_ids
    assert assert_rows(output.multimodal_output["hidden"], prompt, token_ids, oracle) == list(token_ids)


def test_one_request(latent_engine, oracle):
    (prompt,) = random_prompts(7)
    (output,) = run(latent_engine, [{"prompt_token_ids": prompt}], greedy(12))
    assert_like_oracle(output, prompt, oracle)


def test_batch_with_chunked_prefill(latent_engine, oracle):
    """More requests than run at once, prompts longer than a step takes."""
    prompts = random_prompts(5, 70, 33, 1, 100, 20, 64, 32, 31, 150)
    outputs = run(latent_engine, [{"prompt_token_ids": prompt} for prompt in prompts], greedy(12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_like_oracle(output, prompt, oracle)


def test_forced_preemption(latent_engine, oracle):
    """All running requests lose their KV cache again and again, inside their prompts and while they generate."""
    prompts = random_prompts(45, 70, 3, 40)
    for index, prompt in enumerate(prompts):
        latent_engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(10))
    outputs, steps = {}, 0
    while latent_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in latent_engine.step()}
        steps += 1
        if steps in (1, 3, 12, 19):
            assert latent_engine.reset_prefix_cache(reset_running_requests=True)
    for index, prompt in enumerate(prompts):
        assert_like_oracle(outputs[str(index)], prompt, oracle)


def test_one_token_has_the_rows_of_its_prompt(latent_engine, oracle):
    (prompt,) = random_prompts(40)
    (output,) = run(latent_engine, [{"prompt_token_ids": prompt}], greedy(1))
    assert_like_oracle(output, prompt, oracle)


def test_text_prompts_are_answered_in_text_beside_the_rows(latent_engine, oracle):
    text = "Tell me something."
    (output,) = run(latent_engine, [{"prompt": text}], greedy(8))
    assert output.prompt == text
    assert output.outputs[0].text == oracle.tokenizer.decode(output.outputs[0].token_ids)
    assert_like_oracle(output, oracle.tokenizer.encode(text), oracle)


def test_several_sequences_of_one_prompt_have_their_own_rows(latent_engine, oracle):
    (prompt,) = random_prompts(9)
    params = greedy(10, n=3, temperature=1.0, seed=1)
    (output,) = run(latent_engine, [{"prompt_token_ids": prompt}], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    for completion in output.outputs:
        assert_rows(completion.multimodal_output["hidden"], prompt, completion.token_ids, oracle)
    assert output.multimodal_output is output.outputs[0].multimodal_output


@pytest.mark.parametrize("stream_interval", [1, 3])
def test_streamed_increments_add_up(latent_engine, oracle, stream_interval):
    prompts = random_prompts(50, 8)
    params = greedy(7, output_kind=RequestOutputKind.DELTA, stream_interval=stream_interval)
    for index, prompt in enumerate(prompts):
        latent_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    deltas = step_until_idle(latent_engine)
    for index, prompt in enumerate(prompts):
        mine = [delta for delta in deltas if delta.request_id == str(index)]
        rows = [delta.multimodal_output["hidden"] for delta in mine]
        tokens = [token for delta in mine for token in delta.outputs[0].token_ids]
        # Every increment brings the rows of its tokens, one step late; the first also those of the prompt.
        assert [len(r) for r in rows[1:]] == [len(delta.outputs[0].token_ids) for delta in mine[1:]]
        assert assert_rows(torch.cat(rows), prompt, tokens, oracle) == tokens


def test_cumulative_outputs_bring_everything_with_the_last(latent_engine):
    (prompt,) = random_prompts(8)
    latent_engine.add_request("0", {"prompt_token_ids": prompt}, greedy(4, output_kind=RequestOutputKind.CUMULATIVE))
    *early, last = step_until_idle(latent_engine)
    assert [output.multimodal_output for output in early] == [{}] * 3
    assert len(last.multimodal_output["hidden"]) == 8 + 4 - 1


def test_an_aborted_request_does_not_change_others(latent_engine, oracle):
    prompts = random_prompts(40, 12, 60)
    for index, prompt in enumerate(prompts):
        latent_engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(8))
    for _ in range(3):
        latent_engine.step()
    latent_engine.abort_request(["1"])
    outputs = {output.request_id: output for output in step_until_idle(latent_engine)}
    assert sorted(outputs) == ["0", "2"]
    for index in (0, 2):
        assert_like_oracle(outputs[str(index)], prompts[index], oracle)


def test_prompt_embeddings_give_what_the_ids_give(latent_engine, oracle):
    prompts = random_prompts(6, 80, 33)
    embeds = [oracle.model.get_input_embeddings().weight[prompt].detach() for prompt in prompts]
    forms = [
        {"prompt_embeds": embeds[0]},
        {"prompt_embeds": PromptEmbedsPayload.from_tensor(embeds[1])},
        {"prompt_embeds": embeds[2][None], "prompt_token_ids": [299] * 33},
    ]
    outputs = run(latent_engine, [*forms, {"prompt_token_ids": prompts[0]}], greedy(10))
    for prompt, output in zip([*prompts, prompts[0]], outputs, strict=True):
        assert_like_oracle(output, prompt, oracle)


def test_prompt_embeddings_survive_preemption(latent_engine, oracle):
    (prompt,) = random_prompts(50)
    embeds = oracle.model.get_input_embeddings().weight[prompt].detach()
    latent_engine.add_request("0", {"prompt_embeds": embeds}, greedy(8))
    outputs = []
    for step in range(20):
        outputs += latent_engine.step()
        if step in (0, 4):
            latent_engine.reset_prefix_cache(reset_running_requests=True)
    (output,) = outputs
    assert_like_oracle(output, prompt, oracle)


def test_a_seed_fixes_the_tokens_whatever_else_runs(latent_engine, oracle):
    """Also where the prompt takes several steps, whose samples vLLM discards."""
    prompts = random_prompts(100, 5, 70)
    params = greedy(10, temperature=1.0, seed=4)
    alone = [run(latent_engine, [{"prompt_token_ids": prompt}], params)[0] for prompt in prompts]
    together = run(latent_engine, [{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, first, second in zip(prompts, alone, together, strict=True):
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert_rows(second.multimodal_output["hidden"], prompt, second.outputs[0].token_ids, oracle)


def test_unread_rows_are_not_computed(latent_engine, oracle, monkeypatch):
    """Alone nothing is made at all; beside one that is read, and of several sequences, the first has its rows."""
    runner = latent_engine.model_executor.driver_worker.model_runner
    prompts = random_prompts(40, 50, seed=3)
    with monkeypatch.context() as context:
        context.setattr(runner, "_make_rows", None)
        latent_engine.add_request("unread", {"prompt_token_ids": prompts[0]}, greedy(6))
        latent_engine.discard_rows("unread", 0)
        (unread,) = step_until_idle(latent_engine)
    assert unread.multimodal_output == {}
    latent_engine.add_request("unread", {"prompt_token_ids": prompts[0]}, greedy(6))
    latent_engine.discard_rows("unread", 0)
    latent_engine.add_request("read", {"prompt_token_ids": prompts[1]}, greedy(6, n=2, temperature=1.0, seed=1))
    latent_engine.discard_rows("read", 1)
    outputs = {output.request_id: output for output in step_until_idle(latent_engine)}
    assert outputs["unread"].multimodal_output == {}
    assert outputs["unread"].outputs[0].token_ids == unread.outputs[0].token_ids
    first, second = outputs["read"].outputs
    assert_rows(first.multimodal_output["hidden"], prompts[1], first.token_ids, oracle)
    assert second.multimodal_output == {}
