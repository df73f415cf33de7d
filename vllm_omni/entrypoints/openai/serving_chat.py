# SPDX-License-Identifier: Apache-2.0
"""Chat with a pipeline whose first stage reads prompts: vLLM's handler for the text, ours for all other outputs."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import Request
from typing_extensions import Self
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput

from vllm_omni.entrypoints.openai.chat_media import add_media
from vllm_omni.entrypoints.openai.chat_options import ChatOptions, read_chat_options
from vllm_omni.entrypoints.openai.chat_stream import Line, MediaStream
from vllm_omni.entrypoints.openai.engine_client import EngineOutput
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.serving import OmniServing
from vllm_omni.entrypoints.openai.transcripts import Transcripts
from vllm_omni.events import CompletedEvent


class OmniServingChat(OmniServing, OpenAIServingChat):
    """One instance answers all requests; each is handled by a copy that has its own `options` and engine client."""

    options: ChatOptions
    default_modalities: list[str]
    transcripts: Transcripts

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        assert isinstance(request, OmniChatCompletionRequest)
        request.messages = self.transcripts.fill_in(request.messages)
        handler = self._for_request(request)
        answer = await OpenAIServingChat.create_chat_completion(handler, request, raw_request)
        if isinstance(answer, AsyncGenerator):
            await handler.client.started()  # What fails before is answered with an HTTP status.
        return answer

    def _for_request(self, request: OmniChatCompletionRequest) -> Self:
        handler = copy.copy(self)
        handler.options = options = read_chat_options(request, self.client, self.default_modalities)
        handler.engine_client = self.client.with_options(options.for_engine)
        if options.trusts_mm_kwargs:
            handler.online_renderer = copy.copy(self.online_renderer)
            handler.online_renderer.trust_request_mm_kwargs = True
        return handler

    async def chat_completion_full_generator(  # type: ignore[override]
        self,
        request: OmniChatCompletionRequest,
        result_generator: AsyncIterator[EngineOutput],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> ErrorResponse | ChatCompletionResponse:
        completed: list[CompletedEvent] = []

        async def text_only() -> AsyncGenerator[RequestOutput, None]:
            async for output in result_generator:
                if isinstance(output, RequestOutput):
                    yield output
                elif isinstance(output, CompletedEvent):
                    completed.append(output)

        answer = await super().chat_completion_full_generator(request, text_only(), request_id, *args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and completed:
            await add_media(
                answer,
                completed[0],
                self.options.audio_format,
                self.client.config,
                kwargs.get("mm_token_counts"),
                self.transcripts,
                shows_text=self.options.shows_text,
            )
        return answer

    def chat_completion_stream_generator(  # type: ignore[override]
        self,
        request: OmniChatCompletionRequest,
        result_generator: AsyncIterator[EngineOutput],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[Line, None]:
        media = MediaStream(
            result_generator,
            self.options,
            self.client.config,
            request_id,
            model_name,
            kwargs.get("mm_token_counts"),
            self.transcripts,
        )
        text = super().chat_completion_stream_generator(request, media.text(), request_id, model_name, *args, **kwargs)
        return media.lines(text) if self.options.for_engine.wants_media else text
