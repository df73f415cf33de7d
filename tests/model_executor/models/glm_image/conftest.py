# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's first stage, and its reference, on the tiny checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.model_executor.models.engines import start_engine
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processors
from vllm_omni.testing.oracles.glm_image import GlmImageReference


@pytest.fixture(scope="session")
def checkpoint(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("glm_image")


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> GlmImageReference:
    return GlmImageReference(checkpoint)


@pytest.fixture(scope="session")
def pipeline(checkpoint: Path) -> PipelineConfig:
    return read_pipeline(OmniArgs(model=str(checkpoint))).with_checkpoints


@pytest.fixture(scope="session")
def prompt_processor(checkpoint: Path, pipeline: PipelineConfig) -> PromptProcessor:
    return load_prompt_processors(pipeline, str(checkpoint))[0]


@pytest.fixture(scope="session")
def prior_engine(checkpoint: Path, pipeline: PipelineConfig) -> Iterator[OmniLLMEngine]:
    """With so little memory that all cases at once preempt each other."""
    args = {name: value for name, value in pipeline.stages[0].engine_args.items() if name != "model"}
    tight = {"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_batched_tokens": 72}
    engine = start_engine(checkpoint / "vision_language_encoder", **args | tight)
    yield engine
    engine.close()
