# SPDX-License-Identifier: Apache-2.0
"""Chat requests that are wrong in a way that vLLM's own checks stumble over."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest

NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("tools", "message"), [([{}], "the field 'function' is missing"), ([1], "is not what it should be")]
)
def test_tools_that_are_none_are_refused(tools: list[Any], message: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools, "tool_choice": NAMED}
    with pytest.raises(ValidationError, match=message):
        OmniChatCompletionRequest.model_validate(fields)
