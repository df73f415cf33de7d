# SPDX-License-Identifier: Apache-2.0
"""The omni models as shipped, three stages on one GPU, in float32: with CUDA graphs and without."""

from collections.abc import Iterator

import pytest

from tests.gpu.pipelines import LIMITS, Case, assert_same, speak
from vllm_omni import OmniLLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def llm(request: pytest.FixtureRequest, case: Case) -> Iterator[OmniLLM]:
    with OmniLLM(str(case.model), dtype="float32", enforce_eager=request.param, **LIMITS) as llm:
        yield llm


def test_eight_prompts_at_once_equal_transformers(llm: OmniLLM, case: Case) -> None:
    assert_same(speak(llm, case.prompts), case.expected)


def test_each_prompt_alone_equals_transformers(llm: OmniLLM, case: Case) -> None:
    assert_same([speak(llm, [prompt])[0] for prompt in case.prompts[:4]], case.expected[:4])
