# SPDX-License-Identifier: Apache-2.0
"""The thinker's text and the rows that it hands to the talker, against HF's states."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import THINKER_TOKENS, Case

GREEDY = SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS)


def check(output: Any, case: Case, config: PretrainedConfig) -> None:
    assert output.prompt_token_ids == case.expected.prompt_token_ids
    assert list(output.outputs[0].token_ids) == case.expected.thinker_token_ids
    rows = output.multimodal_output[TALKER_INPUT]
    expected = case.thinker_rows(config)
    assert rows.shape == expected.shape
    # States of random weights are as large as 30: the tolerance is relative to that.
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_a_prompt_alone(
    kind: str, thinker_engine: OmniLLMEngine, cases: dict[str, Case], config: PretrainedConfig
) -> None:
    outputs = run_engine(thinker_engine, {kind: cases[kind].prompt}, GREEDY)
    check(outputs[kind], cases[kind], config)


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_a_prompt_that_is_found_in_the_cache(
    kind: str, thinker_engine: OmniLLMEngine, cases: dict[str, Case], config: PretrainedConfig
) -> None:
    """Media that look like others' are told apart: `kind` and `kind2` have the same tokens before their questions."""
    for name in (kind, f"{kind}2", kind):
        if name in cases:
            output = run_engine(thinker_engine, {name: cases[name].prompt}, GREEDY)[name]
            check(output, cases[name], config)
    block_size = thinker_engine.vllm_config.cache_config.block_size
    assert output.num_cached_tokens >= (len(output.prompt_token_ids) - 1) // block_size * block_size > 0


def test_all_at_once_with_chunks_and_preemptions(
    thinker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    config: PretrainedConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preemptions = PreemptionCounter(thinker_engine, monkeypatch)
    outputs = run_engine(thinker_engine, {name: case.prompt for name, case in cases.items()}, GREEDY)
    assert preemptions.count > 0
    for name, case in cases.items():
        check(outputs[name], case, config)
