# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions and /v1/audio/translations, as in OpenAI's API.

Of an omni model the text is that of a chat of one message: the sound, and the request to transcribe it, in the words
that its stage's configuration states. A model that vLLM transcribes with, such as Whisper, has vLLM's handler, see
`vllm_transcriptions.py`.
"""

from __future__ import annotations

import asyncio
import io
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import soundfile
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent, TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageTokens
from openai.types.audio.transcription_verbose import Usage as UsageDuration
from pydantic import BaseModel
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

from vllm_omni.entrypoints.openai.chat import Line, OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.images import RESPONSES as FORM_RESPONSES
from vllm_omni.entrypoints.openai.media_output import to_base64
from vllm_omni.entrypoints.openai.media_request import describe_form, fetch_sound, load_connector, read_request
from vllm_omni.entrypoints.openai.media_stage import model_aliases
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.speech import FINISH_REASON_HEADER, ClosingResponse, sse_line
from vllm_omni.entrypoints.openai.transcription_request import (
    SoundRequest,
    Task,
    TimedTranscriptionRequest,
    TranscriptionRequest,
)

RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": Transcription, "content": {"text/plain": {}, "text/event-stream": {}}},
    **FORM_RESPONSES,
}


class TranscriptionHandler(Protocol):
    """What answers both endpoints.

    Attributes:
        request_class: The requests that it takes.
    """

    request_class: type[SoundRequest]

    async def create(self, request: Any, task: Task, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""


def can_transcribe(client: OmniEngineClient) -> bool:
    """Whether the pipeline's model accepts audio and outputs text."""
    if not client.has_renderer or "text" not in client.config.output_types:
        return False
    processor = client.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("audio", 0) > 0


def accepts_audio(client: OmniEngineClient) -> bool:
    """Whether a chat may have sounds: for the model, or for an ASR stage."""
    return can_transcribe(client) or client.config.accepting_stage("audio", "text") is not None


class ServingTranscriptions:
    """The handler for a model that is asked in a chat."""

    request_class: type[SoundRequest] = TranscriptionRequest

    def __init__(self, chat: OmniServingChat, args: Namespace) -> None:
        self._chat = chat
        self._connector = load_connector(args)
        self._keep_alive_s = float(args.sse_keep_alive_interval)

    async def create(self, request: TranscriptionRequest, task: Task, raw_request: Request) -> Response:
        """See `TranscriptionHandler`."""
        duration = await self._measure(request) if request.response_format == "verbose_json" else 0.0
        chat = request.as_chat(stage_prompt(self._chat.client, task))
        try:
            answer = await self._chat.create_chat_completion(chat, raw_request)
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            if error.parameter == "audio_url":
                error.parameter = "file"
            raise
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), answer.error.code)
        if isinstance(answer, ChatCompletionResponse):
            if request.response_format == "verbose_json":
                return _verbose(answer, request, task, duration)
            return _whole(answer, request.response_format)
        return as_events(answer, self._keep_alive_s)

    async def _measure(self, request: TranscriptionRequest) -> float:
        """Seconds of the sound, which the request then has as data: an address is fetched once."""
        self._chat.client.check_admission()
        samples, sample_rate = await fetch_sound(self._connector, request.file, "file")
        request.file = await asyncio.to_thread(_as_data_uri, samples, sample_rate)
        return len(samples) / sample_rate


def stage_prompt(client: OmniEngineClient, task: Task) -> str:
    """What the stage that reads prompts states for a task."""
    assert client.stage is not None
    return client.stage.transcription_prompt if task == "transcribe" else client.stage.translation_prompt


def _whole(answer: ChatCompletionResponse, response_format: str) -> Response:
    choice = answer.choices[0]
    text = choice.message.content or ""
    headers = {FINISH_REASON_HEADER: choice.finish_reason or "stop"}
    if response_format == "text":
        return PlainTextResponse(text, headers=headers)
    whole = Transcription(text=text, usage=_tokens(answer.usage))
    return JSONResponse(whole.model_dump(exclude_none=True), headers=headers)


def _verbose(answer: ChatCompletionResponse, request: TranscriptionRequest, task: Task, duration: float) -> Response:
    """Without segments, because the model does not know their times."""
    choice = answer.choices[0]
    whole = TranscriptionVerbose(
        text=choice.message.content or "",
        duration=duration,
        language="" if request.language is None else LANGUAGES[request.language],
        usage=UsageDuration(type="duration", seconds=duration),
    )
    headers = {FINISH_REASON_HEADER: choice.finish_reason or "stop"}
    return JSONResponse({"task": task, **whole.model_dump(exclude_none=True)}, headers=headers)


def _as_data_uri(samples: np.ndarray, sample_rate: float) -> str:
    return f"data:audio/wav;base64,{to_base64(as_wav(samples, sample_rate))}"


def as_wav(samples: np.ndarray, sample_rate: float) -> bytes:
    """float32 `[n]` as a file; no sample is changed."""
    file = io.BytesIO()
    soundfile.write(file, samples, int(sample_rate), format="WAV", subtype="FLOAT")
    return file.getvalue()


def as_events(lines: AsyncGenerator[Line, None], keep_alive_s: float) -> Response:
    """OpenAI's server-sent events of vLLM's lines of a chat or a transcription."""
    events = with_sse_keep_alive(_events(lines, RequestContext.current()), keep_alive_s)
    return ClosingResponse(events, "text/event-stream", {})


async def _events(lines: AsyncGenerator[Line, None], context: RequestContext) -> AsyncGenerator[str, None]:
    """An error is the last of them.

    vLLM does not close the outputs that it reads, so they are closed here.
    """
    text, usage, reason = "", UsageInfo(), None
    try:
        async with aclosing(lines):
            async for line in lines:
                data = data_of(line)
                if data is None:
                    continue
                if "error" in data:
                    yield "event: error\n" + sse_line(data)
                    return
                if data.get("usage"):
                    usage = UsageInfo(**data["usage"])
                for choice in data["choices"]:
                    reason = choice.get("finish_reason") or reason
                    if delta := choice["delta"].get("content"):
                        text += delta
                        yield _event(TranscriptionTextDeltaEvent(delta=delta, type="transcript.text.delta"))
    finally:
        await context.abort()
    done = {"type": "transcript.text.done", "text": text, "usage": _tokens(usage).model_dump()}
    yield _event(TranscriptionTextDoneEvent.model_validate({**done, "finish_reason": reason}))


def data_of(line: Line) -> dict[str, Any] | None:
    """The data of a line; None for the mark of the end."""
    data = line.encode() if isinstance(line, str) else line
    return msgspec.json.decode(data[6:]) if data.startswith(b"data: {") else None


def _tokens(usage: UsageInfo) -> UsageTokens:
    return UsageTokens(
        type="tokens",
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        total_tokens=usage.total_tokens,
    )


def _event(event: BaseModel) -> str:
    return f"data: {event.model_dump_json(exclude_none=True)}\n\n"


def _handler(raw_request: Request) -> TranscriptionHandler:
    handler = raw_request.app.state.omni_transcriptions
    if handler is None:
        raise VLLMValidationError("this model does not transcribe speech", parameter="model")
    return handler


async def _sound_request(raw_request: Request) -> SoundRequest:
    request = await read_request(raw_request, _handler(raw_request).request_class, "file")
    state = raw_request.app.state
    is_alias = request.model in model_aliases(state.args, "transcription")
    if is_alias and request.model not in state.openai_serving_models.lora_requests:
        request.model = None  # the one that is served
    return request


router = APIRouter()
_BODY = describe_form(TimedTranscriptionRequest, "file", several=False)


@router.post("/v1/audio/transcriptions", responses=RESPONSES, openapi_extra=_BODY)
@with_cancellation
@load_aware_call
async def create_transcription(
    request: Annotated[SoundRequest, Depends(_sound_request)], raw_request: Request
) -> Response:
    """The transcript of a sound."""
    return await _handler(raw_request).create(request, "transcribe", raw_request)


@router.post("/v1/audio/translations", responses=RESPONSES, openapi_extra=_BODY)
@with_cancellation
@load_aware_call
async def create_translation(
    request: Annotated[SoundRequest, Depends(_sound_request)], raw_request: Request
) -> Response:
    """The transcript of a sound, in English."""
    return await _handler(raw_request).create(request, "translate", raw_request)
