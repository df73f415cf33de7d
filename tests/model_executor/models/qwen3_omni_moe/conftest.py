# SPDX-License-Identifier: Apache-2.0
"""The oracle's answers and one small engine for each stage, shared by the tests of this folder.

The engines are tight on purpose: a batch of eight does not fit into their KV cache and prompts do not fit into one
step, so that every batch runs through chunked prefills and preemptions. One request alone meets neither.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from tests.model_executor.models.engines import TIGHT, start_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.testing.hf_oracle import HFOracle, hf_inputs
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS, make_prompts

from .helpers import TALKER_ENGINE_ARGS, TALKER_TOKENS, THINKER_TOKENS, Case


@pytest.fixture(scope="session")
def config(tiny_qwen3_omni_moe: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(tiny_qwen3_omni_moe)


@pytest.fixture(scope="session")
def oracle(tiny_qwen3_omni_moe: Path) -> HFOracle:
    return HFOracle(tiny_qwen3_omni_moe, num_threads=1)


@pytest.fixture(scope="session")
def cases(tiny_qwen3_omni_moe: Path, oracle: HFOracle) -> dict[str, Case]:
    """One case of each kind of prompt, a second one of each (`text2`, ...), and harder ones."""
    prompts = make_prompts(tiny_qwen3_omni_moe, PROMPT_KINDS)
    prompts |= {f"{kind}2": prompt for kind, prompt in make_prompts(tiny_qwen3_omni_moe, PROMPT_KINDS, seed=7).items()}
    prompts |= make_prompts(tiny_qwen3_omni_moe, HARD_KINDS, seed=3)
    return {
        name: Case(
            prompt=prompt,
            inputs=hf_inputs(oracle.processor, prompt),
            expected=oracle.generate(prompt, thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS),
        )
        for name, prompt in prompts.items()
    }


@pytest.fixture(scope="session")
def thinker_engine(tiny_qwen3_omni_moe: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_qwen3_omni_moe,
        model_arch="Qwen3OmniMoeThinkerForConditionalGeneration",
        engine_output_type="latent",
        enable_prefix_caching=True,  # as a pipeline has it
        limit_mm_per_prompt={"image": 2, "audio": 2, "video": 1},
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,  # as a pipeline has it
        **TIGHT,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def talker_engine(tiny_qwen3_omni_moe: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(tiny_qwen3_omni_moe, **TALKER_ENGINE_ARGS)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def code2wav_engine(tiny_qwen3_omni_moe: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_qwen3_omni_moe,
        engine_type="generation",
        model_arch="Qwen3OmniMoeCode2Wav",
        hf_config_name="code2wav_config",
        engine_output_type="audio",
        max_model_len=512,
    )
    yield engine
    engine.close()
