# SPDX-License-Identifier: Apache-2.0
"""The oracle's answers and one small engine for each stage that writes tokens, shared by the tests of this folder.

The engines are tight on purpose: a batch of all cases does not fit into their KV cache and prompts do not fit into one
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

from .helpers import SPEAKERS, TALKER_TOKENS, THINKER_TOKENS, Case


@pytest.fixture(scope="session")
def config(tiny_qwen2_5_omni: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(tiny_qwen2_5_omni)


@pytest.fixture(scope="session")
def oracle(tiny_qwen2_5_omni: Path) -> HFOracle:
    return HFOracle(tiny_qwen2_5_omni, num_threads=1)


@pytest.fixture(scope="session")
def cases(tiny_qwen2_5_omni: Path, oracle: HFOracle) -> dict[str, Case]:
    """One case of each kind of prompt, a second one of each (`text2`, ...), and harder ones; the voices in turn."""
    prompts = make_prompts(tiny_qwen2_5_omni, PROMPT_KINDS)
    prompts |= {f"{kind}2": prompt for kind, prompt in make_prompts(tiny_qwen2_5_omni, PROMPT_KINDS, seed=7).items()}
    prompts |= make_prompts(tiny_qwen2_5_omni, HARD_KINDS, seed=3)
    speakers = [SPEAKERS[i % len(SPEAKERS)] for i in range(len(prompts))]
    return {
        name: Case(
            prompt=prompt,
            speaker=speaker,
            inputs=hf_inputs(oracle.processor, prompt),
            expected=oracle.generate(
                prompt, thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS, speaker=speaker
            ),
        )
        for (name, prompt), speaker in zip(prompts.items(), speakers, strict=True)
    }


@pytest.fixture(scope="session")
def spoken(cases: dict[str, Case]) -> dict[str, Case]:
    """The cases with a reply of several tokens, which has speech."""
    spoken = {name: case for name, case in cases.items() if len(case.expected.thinker_token_ids) > 1}
    assert len(spoken) >= 8
    return spoken


@pytest.fixture(scope="session")
def thinker_engine(tiny_qwen2_5_omni: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_qwen2_5_omni,
        model_arch="Qwen2_5OmniThinkerForConditionalGeneration",
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
def talker_engine(tiny_qwen2_5_omni: Path) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        tiny_qwen2_5_omni,
        model_arch="Qwen2_5OmniTalkerForConditionalGeneration",
        hf_config_name="talker_config",
        engine_output_type="codes",
        enable_prompt_embeds=True,
        **TIGHT,
    )
    yield engine
    engine.close()
