# SPDX-License-Identifier: Apache-2.0
"""/v1/messages and its token count, in the form of Anthropic's API: vLLM's converters around the pipeline's chat."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import from_json
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest, OmniServing, OmniServingChat
from vllm_omni.entrypoints.openai.chat_messages import read_messages
from vllm_omni.entrypoints.openai.http_errors import (
    MESSAGES_PATH,
    AnthropicErrorResponse,
    OmniHTTPError,
    describe_errors,
    respond,
)
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, ClosingResponse
from vllm_omni.vllm_protocol import ChatCompletionRequest, ChatCompletionResponse, ErrorResponse
from vllm_omni.vllm_versions import MessagesHandler


class OmniServingMessages(OmniServing, MessagesHandler):
    """vLLM's converters. The pipeline's chat, with text as its only output, answers.

    Attributes:
        chat: Its handler.
    """

    chat: OmniServingChat

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        fields: dict[str, Any] = {name: getattr(request, name) for name in request.model_fields_set}
        fields["messages"] = read_messages(fields["messages"])
        chat_request = OmniChatCompletionRequest.model_construct(**fields, modalities=["text"])
        return await self.with_events(self.chat).create_chat_completion(chat_request, raw_request)

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        """vLLM's, which takes every call for a complete one. The input of one that was cut is what it has in full, as
        Anthropic's client reads the stream of such a call.

        Raises:
            OmniHTTPError: The model wrote arguments that are not the beginning of a JSON object.
        """
        with suppress(json.JSONDecodeError):
            return super().messages_full_converter(generator)
        choice = generator.choices[0]
        for call in choice.message.tool_calls:
            call.function.arguments = _complete(call.function.name, call.function.arguments)
        answer = super().messages_full_converter(generator)
        if isinstance(choice.stop_reason, str):
            answer.stop_reason, answer.stop_sequence = "stop_sequence", choice.stop_reason
        return answer


def _complete(name: str, arguments: str) -> str:
    try:
        found = from_json(arguments.strip() or "{}", allow_partial=True)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        message = f"the model called `{name}` with arguments that are not a JSON object"
        raise OmniHTTPError(message, HTTPStatus.INTERNAL_SERVER_ERROR)
    return json.dumps(found)


router = APIRouter()
_ERRORS = {status: {**about, "model": AnthropicErrorResponse} for status, about in describe_errors().items()}


def _handler(raw_request: Request) -> OmniServingMessages:
    return raw_request.app.state.anthropic_serving_messages


@router.post(
    MESSAGES_PATH,
    response_model=None,
    responses={
        HTTPStatus.OK.value: {"model": AnthropicMessagesResponse, "content": {MEDIA_TYPE: {}}},
        **_ERRORS,
    },
)
@model_route
async def create_messages(request: AnthropicMessagesRequest, raw_request: Request) -> Any:
    """Text as the answer to a conversation, whole or as a stream, in the form of Anthropic's Messages API."""
    answer = await _handler(raw_request).create_messages(request, raw_request)
    if isinstance(answer, AsyncGenerator):
        return ClosingResponse(answer, MEDIA_TYPE, {}, RequestContext.of(raw_request))
    return _respond(raw_request, answer)


@router.post(f"{MESSAGES_PATH}/count_tokens", response_model=AnthropicCountTokensResponse, responses=_ERRORS)
@model_route
async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Any:
    """How many tokens a conversation has."""
    return _respond(raw_request, await _handler(raw_request).count_tokens(request, raw_request))


def _respond(raw_request: Request, answer: BaseModel) -> JSONResponse:
    if isinstance(answer, ErrorResponse):
        return respond(raw_request, answer)
    return JSONResponse(answer.model_dump(exclude_none=True))
