# SPDX-License-Identifier: Apache-2.0
"""Speech that is made from windows of the reply equals the speech of the whole reply, at every window size."""

from collections.abc import Iterator

import msgspec
import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.windows import Pieces, run_first_stage, run_stage
from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import TalkerToCode2Wav, ThinkerToTalker
from vllm_omni.outputs import StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.llm_request import ARRequest, GenerationRequest

from .helpers import TALKER_TOKENS, THINKER_TOKENS, Case


@pytest.fixture(scope="module")
def thoughts(thinker_engine: OmniLLMEngine, cases: dict[str, Case]) -> Pieces:
    params = SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS)
    return run_first_stage(thinker_engine, {name: case.prompt for name, case in cases.items()}, params)


def with_params(cases: dict[str, Case], params: SamplingParams) -> dict[str, StageRequest]:
    requests = {name: case.stage_request(name) for name, case in cases.items()}
    return {name: msgspec.structs.replace(r, sampling_params=params) for name, r in requests.items()}


@pytest.mark.parametrize("text_window", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 16))])
def test_codes_do_not_depend_on_when_text_arrives(
    text_window: int,
    thoughts: Pieces,
    talker_engine: OmniLLMEngine,
    cases: dict[str, Case],
    config: PretrainedConfig,
) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=TALKER_TOKENS, detokenize=False)
    window = WindowConfig(window_size=text_window, first_window_size=2, window_growth=2)
    spoken = run_stage(
        talker_engine, ARRequest, ThinkerToTalker(config), with_params(cases, params), thoughts, window, text_window
    )
    for name, case in cases.items():
        whole = merge_stage_outputs(spoken[name])
        assert torch.equal(whole.tensors["codes"], case.expected.codes.T)


def one_by_one(name: str, codes: torch.Tensor) -> Iterator[StageOutput]:
    """`[frames, groups]` codes, frame by frame; one empty piece for no codes."""
    frames = codes.split(1) if len(codes) else [codes]
    for i, frame in enumerate(frames):
        is_last = i == len(frames) - 1
        yield StageOutput(request_id=name, stage_id=1, tensors={"codes": frame}, is_last=is_last)


@pytest.mark.parametrize("code_window", [7, -1, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 25))])
def test_the_waveform_has_no_jumps_between_windows(
    code_window: int, code2wav_engine: OmniLLMEngine, cases: dict[str, Case], config: PretrainedConfig
) -> None:
    codes = {name: case.expected.codes.T for name, case in cases.items()}
    pieces = {name: list(one_by_one(name, frames)) for name, frames in codes.items()}
    window = WindowConfig(window_size=code_window, first_window_size=code_window, unit="codes")
    requests = with_params(cases, SamplingParams(max_tokens=1, detokenize=False))
    waves = run_stage(
        code2wav_engine, GenerationRequest, TalkerToCode2Wav(config), requests, pieces, window, code_window
    )
    for name, case in cases.items():
        wave = merge_stage_outputs(waves[name]).tensors["audio"]
        torch.testing.assert_close(wave, case.expected.audio, rtol=0, atol=1e-4)
        if code_window > 0 and len(codes[name]) > code_window:
            assert len(waves[name]) >= len(codes[name]) // code_window, "speech comes as soon as there is some"
