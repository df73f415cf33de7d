# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's stage and its reference on the tiny checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_executor.models.engines import TIGHT, start_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference


@pytest.fixture(scope="session")
def reference(tiny_vibevoice: Path) -> VibeVoiceReference:
    return VibeVoiceReference(tiny_vibevoice)


@pytest.fixture(scope="session")
def engine(tiny_vibevoice: Path) -> Iterator[OmniLLMEngine]:
    """Room for two requests of several seconds, so that requests preempt each other."""
    engine = start_engine(
        tiny_vibevoice,
        engine_output_type="audio",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        **TIGHT,
    )
    yield engine
    engine.close()
