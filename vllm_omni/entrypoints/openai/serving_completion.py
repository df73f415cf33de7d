# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: vLLM's, sampling as the stage is configured, with errors as HTTP errors also where it streams."""

import copy
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni.entrypoints.openai.engine_client import RequestOptions
from vllm_omni.entrypoints.openai.serving import OmniServing
from vllm_omni.entrypoints.openai.stage_params import said_by


class OmniServingCompletion(OmniServing, OpenAIServingCompletion):
    """Text, whatever else the pipeline makes."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        handler = copy.copy(self)
        client = self.client.with_options(RequestOptions(said=said_by(request)))
        handler.engine_client = client
        answer: Any = await OpenAIServingCompletion.create_completion(handler, request, raw_request)
        if isinstance(answer, AsyncGenerator):
            await client.started()
        return answer
