# SPDX-License-Identifier: Apache-2.0
"""The talker's codes against HF's: alone, in a batch, with chunked prefills and preemptions, greedy and sampled."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.models.qwen2_5_omni.talker import OmniQwen2_5OmniTalker

from .helpers import TALKER_TOKENS, Case, loaded_model


def as_prompt(stage_input: StageInput) -> dict[str, Any]:
    return {
        "prompt_token_ids": stage_input.prompt_token_ids,
        "additional_information": stage_input.additional_information,
    }


@pytest.fixture
def prompts(spoken: dict[str, Case], config: PretrainedConfig) -> dict[str, Any]:
    return {name: as_prompt(case.talker_input(config)) for name, case in spoken.items()}


@pytest.fixture
def make_params(config: PretrainedConfig) -> Any:
    talker = config.talker_config

    def make(**params: Any) -> SamplingParams:
        defaults = {
            "temperature": 0.0,
            "repetition_penalty": 1.05,
            "max_tokens": TALKER_TOKENS,
            "stop_token_ids": [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id],
            "detokenize": False,
        }
        return SamplingParams(**defaults | params)

    return make


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_each_alone(
    talker_engine: OmniLLMEngine, spoken: dict[str, Case], prompts: dict[str, Any], make_params: Any
) -> None:
    for name, case in spoken.items():
        (output,) = run_engine(talker_engine, {name: prompts[name]}, make_params()).values()
        assert tokens_of(output) == case.expected.talker_token_ids, name
        assert output.multimodal_output == {}  # type: ignore[attr-defined]


def test_all_at_once_with_chunks_and_preemptions(
    talker_engine: OmniLLMEngine,
    spoken: dict[str, Case],
    prompts: dict[str, Any],
    make_params: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    outputs = run_engine(talker_engine, prompts, make_params())
    assert preemptions.count > 0
    for name, case in spoken.items():
        assert tokens_of(outputs[name]) == case.expected.talker_token_ids, name


def test_a_seed_fixes_every_code_whatever_else_runs(
    talker_engine: OmniLLMEngine,
    spoken: dict[str, Case],
    prompts: dict[str, Any],
    make_params: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled = {"temperature": 0.9, "top_k": 40, "top_p": 0.8}
    prompt = prompts.pop("text")
    alone = run_engine(talker_engine, {"alone": prompt}, make_params(seed=7, **sampled))["alone"]
    preemptions = PreemptionCounter(talker_engine, monkeypatch)
    params = dict.fromkeys(prompts, make_params()) | {
        "again": make_params(seed=7, **sampled),
        "other": make_params(seed=8, **sampled),
    }
    outputs = run_engine(talker_engine, {**prompts, "again": prompt, "other": prompt}, params)
    assert preemptions.count > 0
    assert tokens_of(outputs["again"]) == tokens_of(alone)
    assert tokens_of(outputs["other"]) != tokens_of(alone)
    for name in prompts:  # greedy requests are not touched by sampled ones
        assert tokens_of(outputs[name]) == spoken[name].expected.talker_token_ids


def test_speech_does_not_start_again(talker_engine: OmniLLMEngine, config: PretrainedConfig) -> None:
    model = loaded_model(talker_engine)
    assert isinstance(model, OmniQwen2_5OmniTalker)
    logits = model.compute_logits(torch.randn(3, config.talker_config.hidden_size))
    assert logits is not None
    is_open = logits[0] > float("-inf")
    assert (~is_open).nonzero().flatten().tolist() == [config.talker_config.tts_codec_start_token_id]


def test_voices_differ(
    talker_engine: OmniLLMEngine, prompts: dict[str, Any], spoken: dict[str, Case], make_params: Any
) -> None:
    voices = {
        voice: {
            **prompts["text"],
            "additional_information": prompts["text"]["additional_information"] | {"speaker": voice},
        }
        for voice in ("chelsie", "ethan", "aiden")
    }
    outputs = run_engine(talker_engine, voices, make_params())
    talker_outputs = {voice: tokens_of(output) for voice, output in outputs.items()}
    assert len({tuple(tokens) for tokens in talker_outputs.values()}) == 3
    assert talker_outputs[spoken["text"].speaker.lower()] == spoken["text"].expected.talker_token_ids


def test_text_stop_ids_of_the_checkpoint_do_not_stop_a_talker(
    talker_engine: OmniLLMEngine, prompts: dict[str, Any], make_params: Any, config: PretrainedConfig
) -> None:
    request = talker_engine.input_processor.process_inputs("0", prompts["text"], make_params())
    talker = config.talker_config
    assert request.sampling_params is not None
    assert request.sampling_params.all_stop_token_ids == {talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id}
