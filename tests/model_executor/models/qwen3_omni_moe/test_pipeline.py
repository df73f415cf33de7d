# SPDX-License-Identifier: Apache-2.0
"""The three stages one after the other in this process: from a prompt to the oracle's waveform."""

from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import run_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import TalkerToCode2Wav, ThinkerToTalker
from vllm_omni.outputs import StageOutput

from .helpers import TALKER_TOKENS, THINKER_TOKENS, Case


def run_stage(
    engine: OmniLLMEngine, stage_id: int, prompts: dict[str, Any], params: SamplingParams
) -> dict[str, StageOutput]:
    outputs: Any = run_engine(engine, prompts, params)
    return {
        name: StageOutput(
            request_id=name,
            stage_id=stage_id,
            prompt_token_ids=output.prompt_token_ids,
            tensors=output.multimodal_output,
        )
        for name, output in outputs.items()
    }


def as_prompt(stage_input: StageInput | None) -> dict[str, Any]:
    assert stage_input is not None
    return {
        "prompt_token_ids": stage_input.prompt_token_ids,
        "additional_information": stage_input.additional_information,
    }


def test_prompts_of_every_kind_through_three_stages(
    thinker_engine: OmniLLMEngine,
    talker_engine: OmniLLMEngine,
    code2wav_engine: OmniLLMEngine,
    cases: dict[str, Case],
    config: PretrainedConfig,
) -> None:
    to_talker, to_code2wav = ThinkerToTalker(config), TalkerToCode2Wav(config)
    requests = {name: case.stage_request(name) for name, case in cases.items()}
    thoughts = run_stage(
        thinker_engine,
        0,
        {name: case.prompt for name, case in cases.items()},
        SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS),
    )
    frames = run_stage(
        talker_engine,
        1,
        {name: as_prompt(to_talker.process(requests[name], {0: thought})) for name, thought in thoughts.items()},
        SamplingParams(
            temperature=0.0,
            repetition_penalty=1.05,
            max_tokens=TALKER_TOKENS,
            stop_token_ids=[config.talker_config.codec_eos_token_id],
            detokenize=False,
        ),
    )
    waves = run_stage(
        code2wav_engine,
        2,
        {name: as_prompt(to_code2wav.process(requests[name], {1: spoken})) for name, spoken in frames.items()},
        SamplingParams(max_tokens=1, detokenize=False),
    )
    for name, case in cases.items():
        torch.testing.assert_close(waves[name].tensors["audio"], case.expected.audio, rtol=0, atol=1e-4)
