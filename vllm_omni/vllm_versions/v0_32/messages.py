# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API."""

from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

__all__ = ["MessagesHandler"]


class MessagesHandler(AnthropicServingMessages):
    def with_events(self, chat: Any) -> Any:
        """The handler of chats, with streams as vLLM converts them: lines, here."""
        return chat
