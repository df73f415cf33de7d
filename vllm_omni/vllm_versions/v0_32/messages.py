# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: vLLM's handler converts the lines of a chat, and takes an error among them for a chunk."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from vllm_omni.vllm_protocol import ErrorInfo, ErrorResponse

__all__ = ["MessagesHandler"]


class MessagesHandler(AnthropicServingMessages):
    def with_events(self, chat: Any) -> Any:
        """The handler of chats, with streams as vLLM converts them: lines, here."""
        return chat

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Anthropic's events; an error is the last of them, with the type that vLLM 0.33 gives it."""
        errors: list[ErrorInfo] = []

        async def chunks() -> AsyncGenerator[str, None]:
            async for line in generator:
                if line.startswith('data: {"error"'):
                    errors.append(ErrorResponse.model_validate_json(line.removeprefix("data: ")).error)
                    return
                yield line

        async for event in super().message_stream_converter(chunks()):
            yield event
        for error in errors:
            kind = "overloaded_error" if error.code == 503 else "api_error"
            data = {"type": "error", "error": {"type": kind, "message": error.message}}
            yield f"event: error\ndata: {json.dumps(data)}\n\n"
