# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's stages against transformers, on windows and through all three."""

import pytest
from transformers import PretrainedConfig

from tests.model_executor.models.omni import PipelineTests
from tests.model_executor.models.speech import CodecTests, SpeechCase, SpeechCodec
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import TalkerToCode2Wav

from .helpers import Case


class TestPipeline(PipelineTests, CodecTests):
    @pytest.fixture(scope="class")
    def codec(self, vocoder_engine: OmniLLMEngine, cases: dict[str, Case], config: PretrainedConfig) -> SpeechCodec:
        speech = {
            name: SpeechCase(case.prompt, case.expected.codes.T, case.expected.audio) for name, case in cases.items()
        }
        return SpeechCodec(vocoder_engine, TalkerToCode2Wav(config), speech)
