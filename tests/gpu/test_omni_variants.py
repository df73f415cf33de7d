# SPDX-License-Identifier: Apache-2.0
"""The omni models on one GPU in bfloat16. Each pipeline ends with its test."""

import pytest
from vllm import SamplingParams

from tests.gpu.pipelines import LIMITS, Case, speak
from vllm_omni import OmniLLM
from vllm_omni.testing.media import make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BFLOAT16_TOLERANCE = 0.2
"""Of the log-probability of a prompt's token, on average; on a CPU it is 0.06 for Qwen2.5-Omni's random weights."""


def test_bfloat16_is_near_float32(case: Case) -> None:
    exact, rounded = (prompt_logprobs(case, dtype) for dtype in ("float32", "bfloat16"))
    assert len(exact) > 8
    differences = [abs(one - other) for one, other in zip(exact, rounded, strict=True)]
    assert 0 < sum(differences) / len(differences) < BFLOAT16_TOLERANCE


def prompt_logprobs(case: Case, dtype: str) -> list[float]:
    """Of each token of a text, after those before it; and checks that there is speech of finite samples."""
    prompt = make_prompt(case.model, "text", seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with OmniLLM(str(case.model), dtype=dtype, enforce_eager=True, **LIMITS) as llm:
        (spoken,) = speak(llm, [case.prompts[0]])
        assert len(spoken.wave) and spoken.wave.isfinite().all()
        (output,) = llm.generate({**prompt, "modalities": ["text"]}, [params, None, None], use_tqdm=False)
    (request_output,) = output.request_output
    assert request_output.prompt_token_ids is not None and request_output.prompt_logprobs is not None
    pairs = list(zip(request_output.prompt_token_ids, request_output.prompt_logprobs, strict=True))[1:]
    return [position[token].logprob for token, position in pairs if position is not None]
