# SPDX-License-Identifier: Apache-2.0
"""After an exception anywhere inside a step, `fail_all` leaves nothing that the next request could stumble over."""

import pytest
import torch

from tests.engine.running import greedy, random_prompts, run, step_until_idle
from vllm_omni.testing.media import make_prompt


class Broken(RuntimeError):
    pass


@pytest.fixture
def break_once(monkeypatch):
    """Makes a method of an object raise, once."""

    def break_method(target, name):
        method = getattr(target, name)

        def broken(*args, **kwargs):
            monkeypatch.setattr(target, name, method)
            raise Broken(name)

        monkeypatch.setattr(target, name, broken)

    return break_method


def runner_of(engine):
    return engine.model_executor.driver_worker.model_runner


def fail(engine, expected_ids):
    with pytest.raises(Broken):
        step_until_idle(engine)
    assert sorted(engine.fail_all()) == expected_ids
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("method", ["_update_states", "_prepare_inputs", "_model_forward", "_make_rows", "_sample"])
def test_wherever_it_breaks(latent_engine, break_once, method):
    """Before, in and after the forward; while the request runs beside another, and one is waiting."""
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(40, 7, 90)]
    expected = run(latent_engine, prompts, greedy(6))
    for index, prompt in enumerate(prompts):
        latent_engine.add_request(str(index), prompt, greedy(6))
    latent_engine.step()
    break_once(runner_of(latent_engine), method)
    fail(latent_engine, ["0", "1", "2"])
    for output, good in zip(run(latent_engine, prompts, greedy(6)), expected, strict=True):
        assert output.outputs[0].token_ids == good.outputs[0].token_ids
        torch.testing.assert_close(output.multimodal_output["hidden"], good.multimodal_output["hidden"])


def test_blocks_that_were_never_filled_are_not_found_in_the_prefix_cache(text_engine, break_once):
    (prompt,) = random_prompts(100, seed=7)
    text_engine.add_request("0", {"prompt_token_ids": prompt}, greedy(4))
    break_once(runner_of(text_engine), "_model_forward")
    fail(text_engine, ["0"])
    (output,) = run(text_engine, [{"prompt_token_ids": prompt}], greedy(4))
    assert output.num_cached_tokens == 0


def test_pictures_that_were_never_encoded_are_not_found_in_the_encoder_cache(
    thinker_engine, tiny_qwen3_omni_moe, break_once
):
    prompt = make_prompt(tiny_qwen3_omni_moe, "image")
    thinker_engine.add_request("0", prompt, greedy(4))
    break_once(runner_of(thinker_engine), "_execute_mm_encoder")
    fail(thinker_engine, ["0"])
    (output,) = run(thinker_engine, [prompt], greedy(4))
    assert len(output.outputs[0].token_ids) == 4


def test_the_workers_hear_of_requests_that_ended_before(latent_engine, break_once):
    """Which requests have ended is told once; the step that was to tell it broke."""
    (prompt,) = random_prompts(5)
    run(latent_engine, [{"prompt_token_ids": prompt}], greedy(2))
    runner = runner_of(latent_engine)
    latent_engine.add_request("0", {"prompt_token_ids": prompt}, greedy(2))
    break_once(runner, "_update_states")
    fail(latent_engine, ["0"])
    latent_engine.engine_core.get_output()
    assert runner.requests == {} and runner.omni_info == {}


def test_generation(vocoder_engine, break_once):
    prompt = {"prompt_token_ids": [0] * 4, "additional_information": {"codes": torch.arange(4)}}
    vocoder_engine.add_request("0", prompt, greedy(1, detokenize=False))
    break_once(runner_of(vocoder_engine), "_make_output")
    fail(vocoder_engine, ["0"])
    (output,) = run(vocoder_engine, [prompt], greedy(1, detokenize=False))
    assert len(output.multimodal_output["audio"]) == 8
