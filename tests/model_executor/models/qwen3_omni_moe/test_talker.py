# SPDX-License-Identifier: Apache-2.0
"""The talker's frames against HF's: alone, in a batch, with chunked prefills and preemptions, greedy and sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine, start_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import TALKER_ENGINE_ARGS, TALKER_TOKENS, Case


@pytest.fixture
def make_prompt(config: PretrainedConfig) -> Any:
    def make(case: Case) -> dict[str, Any]:
        stage_input = case.talker_input(config)
        return {
            "prompt_token_ids": stage_input.prompt_token_ids,
            "additional_information": stage_input.additional_information,
        }

    return make


@pytest.fixture
def make_params(config: PretrainedConfig) -> Any:
    def make(**params: Any) -> SamplingParams:
        defaults = {
            "temperature": 0.0,
            "repetition_penalty": 1.05,
            "max_tokens": TALKER_TOKENS,
            "stop_token_ids": [config.talker_config.codec_eos_token_id],
            "detokenize": False,
        }
        return SamplingParams(**defaults | params)

    return make


def check(output: Any, case: Case) -> None:
    assert list(output.outputs[0].token_ids) == case.expected.talker_token_ids
    codes = output.multimodal_output["codes"]
    assert codes.dtype == torch.int64
    assert torch.equal(codes, case.expected.codes.T)


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_a_request_alone(
    kind: str, talker_engine: OmniLLMEngine, cases: dict[str, Case], make_prompt: Any, make_params: Any
) -> None:
    outputs = run_engine(talker_engine, {kind: make_prompt(cases[kind])}, make_params())
    check(outputs[kind], cases[kind])


def test_all_at_once_with_chunks_and_preemptions(
    talker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    make_prompt: Any,
    make_params: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    outputs = run_engine(talker_engine, {name: make_prompt(case) for name, case in cases.items()}, make_params())
    assert preemptions.count > 0
    for name, case in cases.items():
        check(outputs[name], case)


@pytest.mark.slow
def test_compiled_as_on_a_gpu(
    tiny_qwen3_omni_moe: Path, cases: dict[str, Case], make_prompt: Any, make_params: Any
) -> None:
    engine = start_engine(tiny_qwen3_omni_moe, enforce_eager=False, **TALKER_ENGINE_ARGS)
    outputs = run_engine(engine, {name: make_prompt(case) for name, case in cases.items()}, make_params())
    engine.close()
    for name, case in cases.items():
        check(outputs[name], case)


def test_a_seed_fixes_every_code_whatever_else_runs(
    talker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    make_prompt: Any,
    make_params: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled = {"temperature": 0.9, "top_k": 50}
    prompt = make_prompt(cases["text"])
    alone = run_engine(talker_engine, {"alone": prompt}, make_params(seed=7, **sampled))["alone"]
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    others = {name: make_prompt(case) for name, case in cases.items() if name != "text"}
    params = dict.fromkeys(others, make_params()) | {
        "again": make_params(seed=7, **sampled),
        "other": make_params(seed=8, **sampled),
    }
    outputs: Any = run_engine(talker_engine, {**others, "again": prompt, "other": prompt}, params)
    assert preemptions.count > 0
    codes = {name: outputs[name].multimodal_output["codes"] for name in ("again", "other")}
    assert torch.equal(codes["again"], alone.multimodal_output["codes"])  # type: ignore[attr-defined]
    assert codes["other"].shape != codes["again"].shape or not torch.equal(codes["other"], codes["again"])
    for name in others:
        check(outputs[name], cases[name])  # greedy requests are not touched by sampled ones


def test_without_a_seed_every_run_differs(
    talker_engine: OmniLLMEngine, cases: dict[str, Case], make_prompt: Any, make_params: Any
) -> None:
    prompt = make_prompt(cases["text"])
    params = make_params(temperature=0.9, top_k=50, min_tokens=10)
    outputs: Any = run_engine(talker_engine, {"a": prompt, "b": prompt}, params)
    first, second = (outputs[name].multimodal_output["codes"][:9] for name in "ab")
    assert not torch.equal(first, second)


def test_sampling_at_a_high_temperature_stays_in_the_codebook(
    talker_engine: OmniLLMEngine, cases: dict[str, Case], make_prompt: Any, make_params: Any, config: PretrainedConfig
) -> None:
    prompts = {str(i): make_prompt(cases["text"]) for i in range(4)}
    params = make_params(temperature=2.0, repetition_penalty=2.0, min_tokens=30)
    outputs: Any = run_engine(talker_engine, prompts, params)
    for output in outputs.values():
        codes = output.multimodal_output["codes"]
        assert codes.shape[0] >= 29
        assert codes.min() >= 0 and codes.max() < config.code2wav_config.codebook_size


def test_one_token_makes_no_frame(
    talker_engine: OmniLLMEngine, cases: dict[str, Case], make_prompt: Any, make_params: Any
) -> None:
    output: Any = run_engine(talker_engine, {"0": make_prompt(cases["text"])}, make_params(max_tokens=1))["0"]
    assert len(output.outputs[0].token_ids) == 1
    assert "codes" not in output.multimodal_output


def test_text_stop_ids_of_the_checkpoint_do_not_stop_a_talker(
    talker_engine: OmniLLMEngine, cases: dict[str, Case], make_prompt: Any, make_params: Any, config: PretrainedConfig
) -> None:
    request = talker_engine.input_processor.process_inputs("0", make_prompt(cases["text"]), make_params())
    assert request.sampling_params is not None
    assert request.sampling_params.all_stop_token_ids == {config.talker_config.codec_eos_token_id}


def test_a_seed_fixes_every_code_however_the_text_arrives(
    talker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    make_prompt: Any,
    make_params: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held for want of text, and preempted by others meanwhile; one that is aborted as it waits leaves nothing."""
    params = make_params(temperature=0.9, top_k=50, seed=7)
    prompt = make_prompt(cases["text"])
    alone: Any = run_engine(talker_engine, {"alone": prompt}, params)["alone"]
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    rows = prompt["additional_information"]["reply_rows"]
    num_prompt_tokens = len(prompt["prompt_token_ids"])
    for name in ("late", "gone"):
        first = {**prompt["additional_information"], "reply_rows": rows[:4]}
        talker_engine.add_request(name, {**prompt, "additional_information": first}, params)
        talker_engine.await_input(name, num_prompt_tokens)
    others = {name: make_prompt(case) for name, case in cases.items() if name != "text"}
    for name, other in others.items():
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
    for name in others:
        check(outputs[name], cases[name])
    talker_engine.engine_core.get_output()  # what has ended is dropped with the next step
    runner: Any = talker_engine.model_executor.driver_worker.model_runner  # type: ignore[union-attr]
    sampler = runner.strategy._frames._sampler
    assert (len(runner.slots), runner.omni_info, runner.open_inputs) == (0, {}, set())
    assert (runner.strategy._prompts, sampler._generators, sampler._sampled) == ({}, {}, set())
