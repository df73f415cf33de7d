# SPDX-License-Identifier: Apache-2.0
"""Chat requests that are wrong in a way that vLLM's own checks stumble over."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest

NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(("tools", "message"), [([{}], "the field 'function' is missing"), ([1], "has a wrong type")])
def test_malformed_tools_are_refused(tools: list[Any], message: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools, "tool_choice": NAMED}
    with pytest.raises(ValidationError, match=message):
        OmniChatCompletionRequest.model_validate(fields)
