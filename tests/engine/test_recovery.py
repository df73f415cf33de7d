# SPDX-License-Identifier: Apache-2.0
"""After an exception anywhere inside a step, `recover` continues all requests, without results of the failed step."""

import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from tests.engine.running import Broken, finish, greedy, random_prompts, run, runner_of, step_until_idle
from vllm_omni.testing.media import make_prompt

PLACES = ["_update_states", "_prepare_inputs", "_model_forward", "_make_rows", "_sample", "_row_tracker.emit"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_good_calls", [0, 1, 9])
def test_an_exception_anywhere_in_the_step(latent_engine, break_once, place, num_good_calls):
    """Before, in and after the forward; in the first step, inside a prompt, and while tokens leave one by one."""
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(40, 7, 90)]
    expected = run(latent_engine, prompts, greedy(12))
    for index, prompt in enumerate(prompts):
        latent_engine.add_request(str(index), prompt, greedy(12, output_kind=RequestOutputKind.DELTA))
    runner = runner_of(latent_engine)
    *owner, method = place.split(".")
    break_once(getattr(runner, owner[0]) if owner else runner, method, num_good_calls)
    outputs = finish(latent_engine)
    for index, good in enumerate(expected):
        parts = outputs[str(index)]
        assert [token for part in parts for token in part.outputs[0].token_ids] == good.outputs[0].token_ids
        assert "".join(part.outputs[0].text for part in parts) == good.outputs[0].text
        rows = torch.cat([part.multimodal_output["hidden"] for part in parts if part.multimodal_output])
        torch.testing.assert_close(rows, good.multimodal_output["hidden"], rtol=0, atol=1e-4)
    latent_engine.engine_core.get_output()
    assert (runner.requests, runner._draws, runner._row_tracker._next_position) == ({}, {}, {})


@pytest.mark.parametrize("method", ["_model_forward", "_bookkeeping_sync"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, seed=7, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=12, seed=7, n=3, ignore_eos=True),
        greedy(12, repetition_penalty=1.4, frequency_penalty=0.8, min_tokens=5, prompt_logprobs=1),
        greedy(24, structured_outputs=StructuredOutputsParams(regex="[ab]{7}(cd){3}x*"), ignore_eos=False),
    ],
    ids=["seed", "sequences", "penalties", "grammar"],
)
def test_nothing_of_a_request_is_lost(text_engine, break_once, method, params):
    """Seeds draw each token once, penalties count all tokens, a grammar and each of several sequences continues."""
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(30, 7)]
    params.output_kind = RequestOutputKind.FINAL_ONLY
    expected = run(text_engine, prompts, params)
    for index, prompt in enumerate(prompts):
        text_engine.add_request(str(index), prompt, params)
    break_once(runner_of(text_engine), method, num_good_calls=6)
    outputs = finish(text_engine)
    for index, good in enumerate(expected):
        (output,) = outputs[str(index)]
        for completion, good_one in zip(output.outputs, good.outputs, strict=True):
            assert (completion.token_ids, completion.text) == (good_one.token_ids, good_one.text)
            assert (completion.logprobs is None) == (good_one.logprobs is None)
            assert len(completion.logprobs or ()) == len(good_one.logprobs or ())
        assert len(output.prompt_logprobs or ()) == len(good.prompt_logprobs or ())


def test_blocks_that_were_never_filled_are_not_found_in_the_prefix_cache(text_engine, break_once):
    (prompt,) = random_prompts(100, seed=7)
    (expected,) = run(text_engine, [{"prompt_token_ids": prompt}], greedy(4))
    text_engine.reset_prefix_cache()
    text_engine.add_request("0", {"prompt_token_ids": prompt}, greedy(4))
    break_once(runner_of(text_engine), "_model_forward")
    (output,) = finish(text_engine)["0"]
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_images_that_were_never_encoded_are_not_found_in_the_encoder_cache(
    thinker_engine, tiny_qwen3_omni_moe, break_once
):
    prompt = make_prompt(tiny_qwen3_omni_moe, "image")
    (expected,) = run(thinker_engine, [prompt], greedy(4))
    thinker_engine.engine_core.reset_encoder_cache()
    for method, num_good_calls in (("_execute_mm_encoder", 0), ("_model_forward", 1), ("_sample", -2)):
        num_steps = len(expected.prompt_token_ids) // 32 + 4
        thinker_engine.add_request("0", prompt, greedy(4))
        break_once(runner_of(thinker_engine), method, num_good_calls % num_steps)
        (output,) = finish(thinker_engine)["0"]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        torch.testing.assert_close(
            output.multimodal_output["hidden"], expected.multimodal_output["hidden"], rtol=0, atol=1e-4
        )


def test_ended_requests_are_reported_to_the_workers_again(latent_engine, break_once):
    """Ended requests are reported once; the step with the report raised."""
    (prompt,) = random_prompts(5)
    run(latent_engine, [{"prompt_token_ids": prompt}], greedy(2))
    runner = runner_of(latent_engine)
    latent_engine.add_request("0", {"prompt_token_ids": prompt}, greedy(2))
    break_once(runner, "_update_states")
    with pytest.raises(Broken):
        latent_engine.step()
    latent_engine.recover()
    latent_engine.abort_request(["0"])
    latent_engine.engine_core.get_output()
    assert runner.requests == {} and runner.omni_info == {}


@pytest.mark.parametrize("place", ["update_from_output", "process_outputs"])
def test_requests_whose_tokens_were_lost_end(latent_engine, break_once, place):
    """An exception outside of the model loses the step's tokens. Requests outside of the step continue."""
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(40, 30, 20)]
    expected = run(latent_engine, prompts, greedy(6))
    held, *others = prompts
    latent_engine.add_request("0", held, greedy(6))
    latent_engine.await_input("0", 42)
    while latent_engine.has_work():
        latent_engine.step()
    for index, prompt in enumerate(others, start=1):
        latent_engine.add_request(str(index), prompt, greedy(6))
    processor = latent_engine.output_processor
    target = processor if place == "process_outputs" else latent_engine._core.scheduler.structured_output_manager
    break_once(target, "process_outputs" if place == "process_outputs" else "accept_tokens", 1)
    with pytest.raises(Broken):
        step_until_idle(latent_engine)
    lost = latent_engine.recover()
    assert lost and "0" not in lost
    latent_engine.add_input("0", {}, None, is_last=True)
    for output in step_until_idle(latent_engine):
        good = expected[int(output.request_id)]
        assert output.request_id not in lost
        assert output.outputs[0].token_ids == good.outputs[0].token_ids
    assert not latent_engine.has_unfinished_requests()
    assert latent_engine.kv_blocks()[0] == 0


def test_generation(vocoder_engine, break_once):
    prompt = {"prompt_token_ids": [0] * 4, "additional_information": {"codes": torch.arange(4)}}
    vocoder_engine.add_request("0", prompt, greedy(1, detokenize=False))
    break_once(runner_of(vocoder_engine), "_make_output")
    (output,) = finish(vocoder_engine)["0"]
    assert len(output.multimodal_output["audio"]) == 8
