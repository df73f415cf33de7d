# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's stages and its reference on the tiny checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_executor.models.engines import start_backbone, start_engine
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import CODEC
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference


@pytest.fixture(scope="session")
def reference(tiny_higgs_audio_v2: Path) -> HiggsAudioReference:
    return HiggsAudioReference(tiny_higgs_audio_v2)


@pytest.fixture(scope="session")
def backbone_engine(tiny_higgs_audio_v2: Path) -> Iterator[OmniLLMEngine]:
    engine = start_backbone(tiny_higgs_audio_v2)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def pipeline() -> PipelineConfig:
    return load_pipeline_config(stage_configs_dir() / "higgs_audio_v2.yaml")


@pytest.fixture(scope="session")
def codec_engine(tiny_higgs_audio_v2: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_higgs_audio_v2 / CODEC,
        engine_type="generation",
        model_arch="HiggsAudioV2Codec",
        engine_output_type="audio",
        max_model_len=512,
    )
    yield engine
    engine.close()
