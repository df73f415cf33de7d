# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions for a pipeline of functions that reads a picture, or makes speech of a sound.

It has no chat template. It reads the last message: its image, or its sound, begins at the stage that accepts one, and
its text is the request's `prompt`. The answer is the text and the speech that the pipeline makes, whole or as a stream.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request
from starlette.datastructures import State
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest, default_modalities, read_options
from vllm_omni.entrypoints.openai.chat_media import ChatMedia, Transcripts
from vllm_omni.entrypoints.openai.diffusion_chat import check_fields, read_last_message
from vllm_omni.entrypoints.openai.engine_client import EngineOutput, OmniEngineClient, delta_output
from vllm_omni.entrypoints.openai.media_endpoint import MediaEndpoint, completed_event, new_id
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext
from vllm_omni.entrypoints.openai.sse import DONE, Line, sse_line, with_error
from vllm_omni.entrypoints.openai.streamed_chat import MediaStream
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.vllm_protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    UsageInfo,
)


def media_stage(config: PipelineConfig) -> OmniStageConfig | None:
    """The stage at which the picture, or the sound, of a chat begins; None: no stage accepts one, or only to
    transcribe."""
    picture = next((stage for stage in config.stage_args if stage.accepts == "image"), None)
    return picture or config.accepting_stage("audio", "audio")


class FunctionChat(MediaEndpoint):
    """The chat handler of a pipeline with a `media_stage`, in place of vLLM's `OpenAIServingChat`."""

    kind = "chatcmpl"

    def __init__(self, client: OmniEngineClient, state: State, args: Namespace) -> None:
        """
        Raises:
            StageConfigError: `--default-modalities` has one that the pipeline does not have.
        """
        stage = media_stage(client.config)
        assert stage is not None
        super().__init__(state, client, stage, args)
        self._default_modalities = default_modalities(args.default_modalities, client.config)
        self._transcripts = Transcripts()

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | AsyncGenerator[Line, None]:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed. Who reads a stream first awaits
        the context's `started`, or early errors are lines in it."""
        assert isinstance(request, OmniChatCompletionRequest)
        self.check_model(request.model)
        check_fields(request)
        if request.n not in (None, 1):
            raise VLLMValidationError(f"this model has one answer; n must be 1, not {request.n}", parameter="n")
        context = RequestContext.current()
        context.options = read_options(request, self.client, self._default_modalities)
        answer_id = new_id(self.kind, raw_request)
        stream, model_name = bool(request.stream), request.model or self.model_names[0]
        events = self.start(
            await self._read_prompt(request, context),
            list(context.options.stage_params or ()),
            raw_request,
            answer_id,
            stream=stream,
            keep_outputs=not stream,
            priority=request.priority,
        )
        if not stream:
            return await self._answer(await completed_event(events), answer_id, model_name, context)
        outputs = PrefetchedStream(_engine_outputs(events, answer_id))
        context.outputs.append(outputs)
        lines = MediaStream(outputs, answer_id, model_name, context, self.client.config, self._transcripts)
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        return _with_end(lines.answer(_text_lines(lines, answer_id, model_name, include_usage)))

    async def _read_prompt(self, request: OmniChatCompletionRequest, context: RequestContext) -> OmniPrompt:
        text, images, others = read_last_message(request.messages)
        kind = str(self.stage.accepts)
        urls = images if kind == "image" else others.pop("audio", [])
        others |= {"image": images} if images and kind != "image" else {}
        if len(urls) != 1 or others:
            raise VLLMValidationError(
                f"this model reads the {kind} of the last message: one part of type {kind}_url, not {len(urls)}"
                + (f", and no {', '.join(others)}" if others else ""),
                parameter="messages",
            )
        medium: Any = None
        if kind == "image":
            (medium,) = await self.media.images(urls, "messages")
        else:
            medium = await self.media.sound(urls[0], "messages")
        own = OmniPrompt(prompt=text, stage=self.stage.name, multi_modal_data={kind: medium})
        return cast(OmniPrompt, {**context.options.prompt, **own, "modalities": list(context.options.modalities)})

    async def _answer(
        self, event: CompletedEvent, answer_id: str, model_name: str, context: RequestContext
    ) -> ChatCompletionResponse:
        written = next((output for output in event.outputs if output.final_output_type == "text"), None)
        message = ChatMessage(role="assistant", content=None if written is None else written.outputs[0].text)
        answer = ChatCompletionResponse(
            id=answer_id,
            model=model_name,
            choices=[ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop")],
            usage=UsageInfo(),
        )
        await ChatMedia(context, self.client.config, self._transcripts).add(answer, event)
        return answer


async def _engine_outputs(
    events: AsyncGenerator[OmniEvent, None], request_id: str
) -> AsyncGenerator[EngineOutput, None]:
    """The events of a request, those of its text as outputs of vLLM's engine."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
                yield delta_output(event, request_id, [])
            else:
                yield event


async def _text_lines(
    stream: MediaStream, answer_id: str, model_name: str, include_usage: bool
) -> AsyncGenerator[str, None]:
    """The text of a streamed answer in lines, as vLLM's handler makes them, without its end."""
    own = {"id": answer_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model_name}

    def line(*deltas: dict[str, Any], **more: Any) -> str:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        return sse_line({**own, "choices": choices, **more}).decode()

    yield line({"role": "assistant", "content": ""})
    async with aclosing(stream.text()) as outputs:
        async for output in outputs:
            if output.outputs[0].text:
                yield line({"content": output.outputs[0].text})
    if include_usage:
        yield line(usage=UsageInfo().model_dump())


async def _with_end(lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
    """The lines of a chat, also after an error."""
    async with aclosing(with_error(lines, event="")) as all_lines:
        async for each in all_lines:
            yield each
    yield DONE
