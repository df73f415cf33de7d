# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's talker against transformers."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from tests.model_executor.models.omni import MakeParams, OmniModel, TalkerTests
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

from .helpers import Case


class TestTalker(TalkerTests):
    pass


@pytest.mark.slow
def test_compiled_as_on_a_gpu(
    omni: OmniModel, spoken: dict[str, Case], talker_prompts: dict[str, Any], make_params: MakeParams
) -> None:
    engine = omni.start_talker(enforce_eager=False)
    outputs = run_engine(engine, talker_prompts, make_params())
    engine.close()
    for name, case in spoken.items():
        case.check_speech(outputs[name])


def test_without_a_seed_every_run_differs(
    talker_engine: OmniLLMEngine, talker_prompts: dict[str, Any], make_params: MakeParams
) -> None:
    prompt = talker_prompts["text"]
    params = make_params(temperature=0.9, top_k=50, min_tokens=10)
    outputs: Any = run_engine(talker_engine, {"a": prompt, "b": prompt}, params)
    first, second = (outputs[name].multimodal_output["codes"][:9] for name in "ab")
    assert not torch.equal(first, second)


def test_sampling_at_a_high_temperature_stays_in_the_codebook(
    talker_engine: OmniLLMEngine, talker_prompts: dict[str, Any], make_params: MakeParams, config: PretrainedConfig
) -> None:
    prompts = {str(i): talker_prompts["text"] for i in range(4)}
    params = make_params(temperature=2.0, repetition_penalty=2.0, min_tokens=30)
    outputs: Any = run_engine(talker_engine, prompts, params)
    for output in outputs.values():
        codes = output.multimodal_output["codes"]
        assert codes.shape[0] >= 29
        assert codes.min() >= 0 and codes.max() < config.code2wav_config.codebook_size


def test_one_token_makes_no_frame(
    talker_engine: OmniLLMEngine, talker_prompts: dict[str, Any], make_params: MakeParams
) -> None:
    output: Any = run_engine(talker_engine, {"0": talker_prompts["text"]}, make_params(max_tokens=1))["0"]
    assert len(output.outputs[0].token_ids) == 1
    assert "codes" not in output.multimodal_output


def test_a_seed_fixes_every_code_however_the_text_arrives(
    talker_engine: OmniLLMEngine,
    spoken: dict[str, Case],
    talker_prompts: dict[str, Any],
    make_params: MakeParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held for want of text, and preempted by others meanwhile; one that is aborted as it waits leaves nothing."""
    params = make_params(temperature=0.9, top_k=50, seed=7)
    prompt = talker_prompts.pop("text")
    alone: Any = run_engine(talker_engine, {"alone": prompt}, params)["alone"]
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    rows = prompt["additional_information"]["reply_rows"]
    num_prompt_tokens = len(prompt["prompt_token_ids"])
    for name in ("late", "gone"):
        first = {**prompt["additional_information"], "reply_rows": rows[:4]}
        talker_engine.add_request(name, {**prompt, "additional_information": first}, params)
        talker_engine.await_input(name, num_prompt_tokens)
    for name, other in talker_prompts.items():
        talker_engine.add_request(name, other, make_params())
    outputs: dict[str, Any] = {}
    num_rows = 4
    while talker_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in talker_engine.step()}  # type: ignore[misc]
        if num_rows < len(rows):
            num_ready_tokens = num_prompt_tokens + num_rows + 1 - 4
            more, num_rows = {"reply_rows": rows[num_rows : num_rows + 1]}, num_rows + 1
            talker_engine.add_input("late", more, num_ready_tokens, is_last=num_rows == len(rows))
        else:
            talker_engine.abort_request(["gone"])
    assert preemptions.count > 0
    assert torch.equal(outputs["late"].multimodal_output["codes"], alone.multimodal_output["codes"])
    for name in talker_prompts:
        spoken[name].check_speech(outputs[name])
    talker_engine.engine_core.get_output()  # what has ended is dropped with the next step
    runner: Any = talker_engine.model_executor.driver_worker.model_runner  # type: ignore[union-attr]
    sampler = runner.strategy._frames._sampler
    assert (len(runner.slots), runner.omni_info, runner.open_inputs) == (0, {}, set())
    assert (runner.strategy._prompts, sampler._generators, sampler._sampled) == ({}, {}, set())
