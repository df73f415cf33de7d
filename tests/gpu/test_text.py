# SPDX-License-Identifier: Apache-2.0
"""A text model on one GPU, in float32, beside HF transformers on the CPU."""

from pathlib import Path

import pytest

from vllm_omni import OmniLLM
from vllm_omni.testing.hf_oracle import HFTextOracle
from vllm_omni.testing.media import make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MAX_TOKENS = 24


def test_eight_prompts_at_once_equal_transformers(tiny_qwen3: Path) -> None:
    prompts = [make_prompt(tiny_qwen3, "text", seed) for seed in range(8)]
    params = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    with OmniLLM(str(tiny_qwen3), dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = HFTextOracle(tiny_qwen3)
    expected = [oracle.generate(prompt["prompt"], max_tokens=MAX_TOKENS).token_ids for prompt in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
