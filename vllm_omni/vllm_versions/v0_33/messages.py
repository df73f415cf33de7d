# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: vLLM's handler is a chat's whose streams are converted as they are made, not afterwards."""

import copy
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

__all__ = ["MessagesHandler"]


class MessagesHandler(AnthropicServingMessages):
    def with_events(self, chat: Any) -> Any:
        """The handler of chats, with streams of Anthropic's events. Text only."""

        def convert(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
            # mypy knows the installed version only.
            chunks: Any = chat.chat_completion_stream_generator_raw(*args, **kwargs)
            return self.message_stream_converter(chunks)

        ours = copy.copy(chat)
        ours.chat_completion_stream_generator = convert
        return ours
