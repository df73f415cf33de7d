# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's talker against transformers."""

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.model_executor.models.engines import run_engine
from tests.model_executor.models.omni import MakeParams, TalkerTests, loaded_model
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen2_5_omni.talker import OmniQwen2_5OmniTalker
from vllm_omni.testing.hf_oracle import HFOracle

from .helpers import Case, log_probs_of


class TestTalker(TalkerTests):
    pass


def test_speech_does_not_start_again(
    talker_engine: OmniLLMEngine, config: PretrainedConfig, talker_prompts: dict[str, Any], make_params: MakeParams
) -> None:
    start_id = config.talker_config.tts_codec_start_token_id
    model = loaded_model(talker_engine)
    assert isinstance(model, OmniQwen2_5OmniTalker)
    assert model.suppressed_tokens().nonzero().flatten().tolist() == [start_id]
    prompts = {name: talker_prompts["text"] for name in ("greedy", "sampled")}
    bias = {start_id: 100.0}
    params = {
        "greedy": make_params(logit_bias=bias),
        "sampled": make_params(logit_bias=bias, temperature=2.0, min_tokens=10),
    }
    for output in run_engine(talker_engine, prompts, params).values():
        assert start_id not in output.outputs[0].token_ids
    logits = model.compute_logits(torch.randn(3, config.talker_config.hidden_size))
    assert logits is not None and logits.isfinite().all()


def test_voices_differ(
    talker_engine: OmniLLMEngine, talker_prompts: dict[str, Any], spoken: dict[str, Case], make_params: MakeParams
) -> None:
    prompt, information = talker_prompts["text"], talker_prompts["text"]["additional_information"]
    voices = {
        voice: {**prompt, "additional_information": information | {"speaker": voice}}
        for voice in ("chelsie", "ethan", "aiden")
    }
    outputs = run_engine(talker_engine, voices, make_params())
    talker_outputs = {voice: list(output.outputs[0].token_ids) for voice, output in outputs.items()}
    assert len({tuple(tokens) for tokens in talker_outputs.values()}) == 3
    assert talker_outputs[spoken["text"].speaker.lower()] == spoken["text"].expected.talker_token_ids


@torch.no_grad()
def test_log_probabilities_of_the_same_rows(
    talker_engine: OmniLLMEngine, oracle: HFOracle, talker_prompts: dict[str, Any], make_params: MakeParams
) -> None:
    """All cases at once, with media and without. Of float32's rounding, which is as large in transformers alone."""
    params = make_params(temperature=1.0, repetition_penalty=1.0, seed=1, logprobs=0)
    for name, output in run_engine(talker_engine, talker_prompts, params).items():
        (choice,) = output.outputs
        tokens = list(choice.token_ids)
        assert choice.logprobs is not None
        ours = torch.tensor([row[token].logprob for row, token in zip(choice.logprobs, tokens, strict=True)])
        expected = log_probs_of(oracle.model, talker_prompts[name]["additional_information"], tokens)
        torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)
