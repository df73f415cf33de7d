# SPDX-License-Identifier: Apache-2.0
"""Codes that are made from windows of the reply equal the codes of the whole reply, at every window size."""

import msgspec
import pytest
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import ThinkerToTalker
from vllm_omni.outputs import merge_stage_outputs
from vllm_omni.stage.engines.llm_request import ARRequest

from ..windows import Pieces, run_first_stage, run_stage
from .helpers import TALKER_TOKENS, THINKER_TOKENS, Case


@pytest.fixture(scope="module")
def thoughts(thinker_engine: OmniLLMEngine, cases: dict[str, Case]) -> Pieces:
    params = SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS)
    return run_first_stage(thinker_engine, {name: case.prompt for name, case in cases.items()}, params)


@pytest.mark.parametrize("window_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, -1))])
def test_codes_do_not_depend_on_when_text_arrives(
    window_size: int,
    thoughts: Pieces,
    talker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    config: PretrainedConfig,
) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=TALKER_TOKENS, detokenize=False)
    requests = {
        name: msgspec.structs.replace(case.stage_request(name), sampling_params=params) for name, case in cases.items()
    }
    window = WindowConfig(window_size=window_size, first_window_size=2)
    spoken = run_stage(talker_engine, ARRequest, ThinkerToTalker(config), requests, thoughts, window, window_size)
    for name, case in cases.items():
        whole = merge_stage_outputs(spoken[name])
        tokens = [token for completion in whole.completions for token in completion.token_ids]
        assert tokens == case.expected.talker_token_ids, name
