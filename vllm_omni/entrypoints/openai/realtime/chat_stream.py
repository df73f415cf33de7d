# SPDX-License-Identifier: Apache-2.0
"""A request for the chat handler, and its answer as deltas while they are made: the text, calls, speech and usage."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.realtime.audio import Sound
from vllm_omni.entrypoints.openai.realtime.config import Values, voice_name
from vllm_omni.entrypoints.openai.realtime.conversation import Message, Picture
from vllm_omni.entrypoints.openai.realtime.output_items import SessionContext
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import ErrorLine
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.errors import OmniError
from vllm_omni.vllm_protocol import ErrorResponse

logger = logging.getLogger("vllm.omni.server")

USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""With every chunk, because an answer may be cut at any."""


def make_request(settings: Values, messages: Sequence[Message]) -> OmniChatCompletionRequest:
    """The request of a response.

    Args:
        settings: The configuration of the response.
        messages: Those of the conversation.

    Raises:
        EventError: They make no request.
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
    try:
        return OmniChatCompletionRequest.model_validate(fields)
    except (VLLMClientError, ValueError) as error:
        raise EventError(f"the response cannot be made: {error}", "response") from error


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


async def deltas_of(
    session: SessionContext,
    request: OmniChatCompletionRequest,
    media: Iterable[Sound | Picture],
    fit_prompt: Any = None,
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of a streamed answer. Closing the generator aborts the request.

    Run it in a task of its own: the request's context is the task's.

    Args:
        media: Those whose addresses its messages have.
        fit_prompt: See `RequestContext`.

    Raises:
        EventError: The request was refused, or failed.
    """
    context = RequestContext.start(session.client)
    kept = {each.address: each for each in media}
    context.kept_sounds = {address: each.decoded for address, each in kept.items() if isinstance(each, Sound)}
    context.kept_files = {address: each.source for address, each in kept.items() if isinstance(each, Picture)}
    if fit_prompt is not None and (cache := session.chat.client.renderer.mm_processor_cache) is not None:
        context.is_preprocessed = lambda address: address in kept and cache.is_cached_item(address)
    context.fit_prompt = fit_prompt
    try:
        answer = await session.chat.create_deltas(request)
        if isinstance(answer, ErrorResponse):
            raise _failure(answer.error.message, answer.error.code, answer.error.param)
        await context.started()
        async with aclosing(answer):
            async for delta in answer:
                yield delta
    except Exception as error:
        raise as_event_error(error) from error
    finally:
        await context.abort()


def as_event_error(error: Exception, param: str | None = None) -> EventError:
    """An error as the client is told; an internal one goes to the log.

    Args:
        param: The field of the event, where it is not that of the error.
    """
    if isinstance(error, EventError):
        return error
    if isinstance(error, ErrorLine):
        line = error.args[0]["error"]
        return _failure(line["message"], line["code"], param or line.get("param"))
    if isinstance(error, OmniError):
        error = to_http_error(error)
    if isinstance(error, GracefulHTTPError):
        return _failure(str(error), error.http_status.value, param)
    if isinstance(error, (VLLMClientError, ValueError)):
        message = str(error.args[0] if error.args else error)
        return _failure(message, 400, param or getattr(error, "parameter", None))
    logger.error("a realtime response failed", exc_info=error)
    return _failure("internal error; see the server's log", 500, param)


def _failure(message: str, status: Any, param: str | None) -> EventError:
    code = str(status)
    return EventError(message, param, code, "server_error" if code.startswith("5") else "invalid_request_error")
