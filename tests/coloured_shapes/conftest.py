# SPDX-License-Identifier: Apache-2.0
"""The shipped omni model, which speaks and whose stages die."""

from collections.abc import Iterator

import pytest

from vllm_omni import OmniLLM


@pytest.fixture(scope="session")
def shapes_llm() -> Iterator[OmniLLM]:
    """Its grammars have no spaces, which it would not end."""
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    with OmniLLM("shapes", structured_outputs_config=grammars) as llm:
        yield llm
