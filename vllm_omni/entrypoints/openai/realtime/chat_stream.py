# SPDX-License-Identifier: Apache-2.0
"""A request for the chat handler, and its answer as deltas while they are made: the text, calls, speech and usage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest, OmniServingChat
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.realtime.config import Values, voice_name
from vllm_omni.entrypoints.openai.realtime.conversation import Message, Picture, Sound
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import ErrorLine
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.errors import OmniError
from vllm_omni.vllm_protocol import ErrorResponse

logger = logging.getLogger("vllm.omni.server")

USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""With every chunk, because an answer may be cut at any."""


class ChatError(Exception):
    """A request that failed, as the client is told.

    Attributes:
        type, code, param: Of OpenAI's error objects.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param

    @property
    def type(self) -> str:
        return "server_error" if self.code.startswith("5") else "invalid_request_error"

    def as_dict(self) -> dict[str, Any]:
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


def make_request(settings: Values, messages: Sequence[Message]) -> OmniChatCompletionRequest:
    """The request of a response.

    Args:
        settings: The configuration of the response.
        messages: Those of the conversation.
    """
    speaks = settings["output_modalities"] == ["audio"]
    limit = settings["max_output_tokens"]
    fields: dict[str, Any] = {
        "model": settings["model"],
        "messages": messages,
        "modalities": ["text", "audio"] if speaks else ["text"],
        "stream": True,
        "stream_options": USAGE,
        "max_completion_tokens": None if limit == "inf" else limit,
    }
    if speaks:
        fields["audio"] = {"format": "pcm16", "voice": voice_name(settings["audio"]["output"]["voice"])}
    if settings["tools"]:
        fields["tools"] = [_tool(tool) for tool in settings["tools"]]
        fields["tool_choice"] = _tool_choice(settings["tool_choice"])
        fields["parallel_tool_calls"] = settings["parallel_tool_calls"]
    return OmniChatCompletionRequest.model_validate(fields)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


async def deltas_of(
    chat: OmniServingChat,
    request: OmniChatCompletionRequest,
    client: RequestContext,
    sounds: Iterable[Sound],
    pictures: Iterable[Picture] = (),
    count_unread: Callable[[int], None] | None = None,
    fit_prompt: Any = None,
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of a streamed answer. Closing the generator aborts the request.

    Run it in a task of its own: the request's context is the task's.

    Args:
        client: See `SessionContext`.
        sounds, pictures: Those whose addresses its messages have.
        count_unread: See `AsyncOmniLLM.generate`.
        fit_prompt: See `RequestContext`.

    Raises:
        ChatError: The request was refused, or failed.
    """
    context = RequestContext.start(client)
    context.kept_sounds = {sound.address: sound.decoded for sound in sounds}
    context.kept_files = {picture.address: picture.file for picture in pictures}
    context.count_unread, context.fit_prompt = count_unread, fit_prompt
    try:
        answer = await chat.create_deltas(request)
        if isinstance(answer, ErrorResponse):
            raise ChatError(answer.error.message, str(answer.error.code), answer.error.param)
        await context.started()
        async with aclosing(answer):
            async for delta in answer:
                yield delta
    except Exception as error:
        raise as_chat_error(error) from error
    finally:
        await context.abort()


def as_chat_error(error: Exception) -> ChatError:
    """An error as the client is told; an internal one goes to the log."""
    if isinstance(error, ChatError):
        return error
    if isinstance(error, ErrorLine):
        line = error.args[0]["error"]
        return ChatError(line["message"], str(line["code"]), line.get("param"))
    if isinstance(error, OmniError):
        error = to_http_error(error)
    if isinstance(error, GracefulHTTPError):
        return ChatError(str(error), str(error.http_status.value))
    if isinstance(error, (VLLMClientError, ValueError)):
        return ChatError(str(error.args[0] if error.args else error), "400", getattr(error, "parameter", None))
    logger.error("a realtime response failed", exc_info=error)
    return ChatError("internal error; see the server's log", "500")


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for its end, also when it is cancelled itself."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
