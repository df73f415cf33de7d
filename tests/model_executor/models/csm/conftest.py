# SPDX-License-Identifier: Apache-2.0
"""CSM's stages and its reference on the tiny checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_executor.models.engines import start_backbone, start_engine
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.testing.oracles.csm import CsmReference


@pytest.fixture(scope="session")
def reference(tiny_csm: Path) -> CsmReference:
    return CsmReference(tiny_csm)


@pytest.fixture(scope="session")
def backbone_engine(tiny_csm: Path) -> Iterator[OmniLLMEngine]:
    engine = start_backbone(tiny_csm)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def pipeline() -> PipelineConfig:
    return load_pipeline_config(stage_configs_dir() / "csm.yaml")


@pytest.fixture(scope="session")
def codec_engine(tiny_csm: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_csm,
        engine_type="generation",
        model_arch="CsmCodec",
        hf_config_name="codec_config",
        engine_output_type="audio",
        max_model_len=512,
    )
    yield engine
    engine.close()
