# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: vLLM's route, with our request's fields in its description."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion as vllm_create_chat_completion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    responses={
        HTTPStatus.OK.value: {"content": {"text/event-stream": {}}},
        HTTPStatus.BAD_REQUEST.value: {"model": ErrorResponse},
        HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse},
        HTTPStatus.TOO_MANY_REQUESTS.value: {"model": ErrorResponse},
        HTTPStatus.SERVICE_UNAVAILABLE.value: {"model": ErrorResponse},
        HTTPStatus.GATEWAY_TIMEOUT.value: {"model": ErrorResponse},
    },
)
async def create_chat_completion(request: OmniChatCompletionRequest, raw_request: Request) -> Any:
    """Text, speech, images or videos as the answer to a conversation, whole or as a stream."""
    return await vllm_create_chat_completion(request, raw_request)


def attach_router(app: FastAPI) -> None:
    app.include_router(router)
