# SPDX-License-Identifier: Apache-2.0
"""A model whose input is its output of the step before, against the same loop in plain torch."""

import pytest
import torch

from tests.engine.hooked_models import FEEDBACK
from tests.engine.running import greedy, random_prompts, run, step_until_idle

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@torch.no_grad()
def expected_rows(model, prompt, shift, num_tokens):
    """Tokens, and for each fed back token its final and its layer 2 input state."""
    embeddings = model.get_input_embeddings()
    embeds, tokens = embeddings(torch.tensor(prompt)) + shift, []
    for _ in range(num_tokens):
        states = model.model(inputs_embeds=embeds[None], output_hidden_states=True)
        last = states.last_hidden_state[0, -1]
        tokens.append(int(model.lm_head(last).argmax()))
        embeds = torch.cat([embeds, embeddings(torch.tensor(tokens[-1:])) + FEEDBACK * last])
    generated = slice(len(prompt), len(prompt) + num_tokens - 1)
    return tokens, states.last_hidden_state[0, generated], states.hidden_states[2][0, generated]


def assert_as_expected(output, model, prompt, shift):
    tokens, latent, layer2 = expected_rows(model, prompt, shift, len(output.outputs[0].token_ids))
    assert output.outputs[0].token_ids == tokens
    rows = output.multimodal_output
    assert sorted(rows) == ["latent", "layer2", "tokens"]
    torch.testing.assert_close(rows["latent"], latent, **TOLERANCE)
    torch.testing.assert_close(rows["layer2"], layer2, **TOLERANCE)
    assert rows["tokens"].tolist() == tokens[:-1]


def as_prompt(token_ids, shift, **information):
    return {"prompt_token_ids": token_ids, "additional_information": {"shift": shift, **information}}


@pytest.fixture
def shifts():
    return list(torch.randn(6, 128, generator=torch.Generator().manual_seed(3)) * 0.05)


def test_one_request(hooked_engine, oracle, shifts):
    (prompt,) = random_prompts(11)
    (output,) = run(hooked_engine, [as_prompt(prompt, shifts[0])], greedy(9))
    assert_as_expected(output, oracle.model, prompt, shifts[0])


def test_requests_preempt_each_other(hooked_engine, oracle, shifts):
    """6 requests need 25 blocks of 10: a preempted one computes its rows again and emits none twice."""
    prompts = random_prompts(90, 70, 80, 60, 75, 85)
    for index, prompt in enumerate(prompts):
        hooked_engine.add_request(str(index), as_prompt(prompt, shifts[index]), greedy(40))
    scheduler = hooked_engine.engine_core.engine_core.scheduler
    outputs, num_preemptions = {}, {}
    while hooked_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in hooked_engine.step()}
        num_preemptions |= {request.request_id: request.num_preemptions for request in scheduler.requests.values()}
    assert sum(num_preemptions.values()) > 0
    for index, prompt in enumerate(prompts):
        assert_as_expected(outputs[str(index)], oracle.model, prompt, shifts[index])


def test_forced_preemption_inside_prompt_and_answer(hooked_engine, oracle, shifts):
    prompts = random_prompts(100, 20)
    for index, prompt in enumerate(prompts):
        hooked_engine.add_request(str(index), as_prompt(prompt, shifts[index]), greedy(12))
    outputs, steps = {}, 0
    while hooked_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in hooked_engine.step()}
        steps += 1
        if steps in (1, 5, 11):
            assert hooked_engine.reset_prefix_cache(reset_running_requests=True)
    for index, prompt in enumerate(prompts):
        assert_as_expected(outputs[str(index)], oracle.model, prompt, shifts[index])


def test_without_a_second_token_there_are_no_generated_rows(hooked_engine):
    (prompt,) = random_prompts(5)
    (output,) = run(hooked_engine, [{"prompt_token_ids": prompt}], greedy(1))
    assert output.multimodal_output == {}


def test_nothing_is_kept_of_requests_that_have_ended(hooked_engine, shifts):
    prompts = random_prompts(70, 5)
    run(hooked_engine, [as_prompt(prompt, shifts[0]) for prompt in prompts], greedy(3))
    hooked_engine.add_request("aborted", as_prompt(prompts[0], shifts[0]), greedy(3))
    hooked_engine.step()
    hooked_engine.abort_request(["aborted"])
    # What ended is dropped with the next step; run one request, and one step more for itself.
    run(hooked_engine, [as_prompt(prompts[1], shifts[0])], greedy(1))
    hooked_engine.engine_core.get_output()
    runner = hooked_engine.model_executor.driver_worker.model_runner
    tracker = runner._row_tracker
    assert (runner.omni_info, runner.requests, tracker._next_position, tracker._pending) == ({}, {}, {}, {})


class TestRaisingHook:
    def test_the_engine_still_works(self, hooked_engine, oracle, shifts):
        prompts = random_prompts(70, 20, 50)
        hooked_engine.add_request("good", as_prompt(prompts[0], shifts[0]), greedy(20))
        hooked_engine.add_request("bad", as_prompt(prompts[1], shifts[1], raise_at=23), greedy(20))
        with pytest.raises(RuntimeError, match="told to raise at 23"):
            step_until_idle(hooked_engine)
        with pytest.raises(RuntimeError, match="recover"):
            hooked_engine.step()
        with pytest.raises(RuntimeError, match="recover"):
            hooked_engine.add_request("late", as_prompt(prompts[2], shifts[2]), greedy(2))
        assert hooked_engine.recover() == []
        with pytest.raises(RuntimeError, match="told to raise at 23"):
            step_until_idle(hooked_engine)
        assert hooked_engine.recover() == []
        hooked_engine.abort_request(["bad"])
        (output,) = step_until_idle(hooked_engine)
        assert_as_expected(output, oracle.model, prompts[0], shifts[0])

        outputs = run(hooked_engine, [as_prompt(p, s) for p, s in zip(prompts, shifts, strict=False)], greedy(10))
        for prompt, shift, output in zip(prompts, shifts, outputs, strict=False):
            assert_as_expected(output, oracle.model, prompt, shift)
        scheduler = hooked_engine.engine_core.engine_core.scheduler
        assert scheduler.kv_cache_manager.usage == 0.0
        assert not scheduler.requests

    def test_in_the_first_step_of_a_request(self, hooked_engine, oracle, shifts):
        (prompt,) = random_prompts(10)
        hooked_engine.add_request("bad", as_prompt(prompt, shifts[0], raise_at=0), greedy(5))
        with pytest.raises(RuntimeError, match="told to raise"):
            hooked_engine.step()
        assert hooked_engine.recover() == []
        hooked_engine.abort_request(["bad"])
        (output,) = run(hooked_engine, [as_prompt(prompt, shifts[0])], greedy(5))
        assert_as_expected(output, oracle.model, prompt, shifts[0])

    def test_an_engine_that_has_nothing_to_recover_from(self, hooked_engine, oracle, shifts):
        assert hooked_engine.recover() == []
        (prompt,) = random_prompts(10)
        hooked_engine.add_request("0", as_prompt(prompt, shifts[0]), greedy(5))
        hooked_engine.step()
        assert hooked_engine.recover() == []
        (output,) = step_until_idle(hooked_engine)
        assert_as_expected(output, oracle.model, prompt, shifts[0])
