# SPDX-License-Identifier: Apache-2.0
"""The three stages one after the other in this process, all on windows: from a prompt to the oracle's waveform."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import start_engine
from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import TalkerToToken2Wav, ThinkerToTalker
from vllm_omni.outputs import merge_stage_outputs
from vllm_omni.stage.engines.llm_request import ARRequest, GenerationRequest

from ..windows import run_first_stage, run_stage
from .helpers import TALKER_TOKENS, THINKER_TOKENS, Case

THINKER = SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS)
TALKER = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=TALKER_TOKENS, detokenize=False)
TOKEN2WAV = SamplingParams(max_tokens=1, seed=0, detokenize=False)
IN_WINDOWS = WindowConfig(window_size=16, first_window_size=2, window_growth=2)
WHOLE = WindowConfig()


@pytest.fixture(scope="module")
def token2wav_engine(tiny_qwen2_5_omni: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_qwen2_5_omni,
        engine_type="generation",
        model_arch="Qwen2_5OmniToken2WavModel",
        hf_config_name="token2wav_config",
        engine_output_type="audio",
        max_model_len=512,
    )
    yield engine
    engine.close()


def test_prompts_of_every_kind_and_every_voice_through_three_stages(
    thinker_engine: OmniLLMEngine,
    talker_engine: OmniLLMEngine,
    token2wav_engine: OmniLLMEngine,
    cases: dict[str, Case],
    config: PretrainedConfig,
) -> None:
    def requests(params: SamplingParams) -> dict[str, StageRequest]:
        made = {name: case.stage_request(name) for name, case in cases.items()}
        return {name: msgspec.structs.replace(request, sampling_params=params) for name, request in made.items()}

    thoughts = run_first_stage(thinker_engine, {name: case.prompt for name, case in cases.items()}, THINKER)
    spoken = run_stage(talker_engine, ARRequest, ThinkerToTalker(config), requests(TALKER), thoughts, IN_WINDOWS)
    waves = run_stage(
        token2wav_engine, GenerationRequest, TalkerToToken2Wav(config), requests(TOKEN2WAV), spoken, WHOLE
    )
    for name, case in cases.items():
        wave = merge_stage_outputs(waves[name]).tensors["audio"]
        torch.testing.assert_close(
            wave, case.expected.audio, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
