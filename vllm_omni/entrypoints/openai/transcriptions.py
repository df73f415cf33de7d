# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions and /v1/audio/translations, as in OpenAI's API.

Of an omni model the text is that of a chat of one message: the sound, and the request to transcribe it, in the words
that its stage's configuration states. A pipeline with an ASR stage runs that alone. A model that vLLM transcribes with,
such as Whisper, has vLLM's handler, see `vllm_transcriptions.py`.
"""

from __future__ import annotations

import asyncio
import io
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
import soundfile
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageDuration, UsageTokens
from openai.types.audio.transcription_verbose import Usage as VerboseUsage
from starlette.datastructures import State
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.chat_deltas import ChatDelta, read_deltas
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import check_model, model_aliases, new_id, served_names
from vllm_omni.entrypoints.openai.media_output import FINISH_REASON_HEADER, to_base64
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route, started
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, Data, Line, sse_line, sse_response
from vllm_omni.entrypoints.openai.transcription_request import (
    SoundRequest,
    Task,
    TimedTranscriptionRequest,
    TranscriptionRequest,
)
from vllm_omni.vllm_protocol import ChatCompletionResponse, ErrorResponse, UsageInfo

RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": Transcription, "content": {"text/plain": {}, MEDIA_TYPE: {}}},
    **FORM_ERRORS,
}


class TranscriptionHandler:
    """What answers both endpoints.

    Attributes:
        request_class: The requests that it takes.
    """

    request_class: type[SoundRequest] = TranscriptionRequest

    def __init__(self, client: OmniEngineClient, args: Namespace) -> None:
        self._media = MediaFetcher(client, args)
        self._keep_alive_s = float(args.sse_keep_alive_interval)

    async def create(self, request: Any, task: Task, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Transcript:
    """The text so far, and what is known with its last delta. An ASR stage gives no finish reason."""

    text: str = ""
    usage: UsageTokens | UsageDuration
    finish_reason: str | None = None

    def as_answer(self, request: TranscriptionRequest, task: Task, seconds: float) -> Response:
        """The whole, in the format of the request. It has no segments, because the model does not know their times.

        Args:
            seconds: The length of the sound, for `verbose_json`.
        """
        headers = {} if self.finish_reason is None else {FINISH_REASON_HEADER: self.finish_reason}
        if request.response_format == "text":
            return PlainTextResponse(self.text, headers=headers)
        if request.response_format == "json":
            whole = Transcription(text=self.text, usage=self.usage)
            return JSONResponse(whole.model_dump(exclude_none=True), headers=headers)
        language = "" if request.language is None else LANGUAGES[request.language]
        usage = VerboseUsage(type="duration", seconds=seconds)
        verbose = TranscriptionVerbose(text=self.text, duration=seconds, language=language, usage=usage)
        return JSONResponse({"task": task, **verbose.model_dump(exclude_none=True)}, headers=headers)


def token_usage(usage: UsageInfo) -> UsageTokens:
    return UsageTokens(
        type="tokens",
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        total_tokens=usage.total_tokens,
    )


def lines_as_events(lines: AsyncGenerator[Line, None], context: RequestContext, keep_alive_s: float) -> Response:
    """The answer with the events of vLLM's lines of a chat or a transcription."""
    transcript = Transcript(usage=token_usage(UsageInfo()))
    deltas = read_texts(read_deltas(lines, context), transcript)
    return sse_response(as_events(deltas, transcript), keep_alive_s)


async def as_events(deltas: AsyncGenerator[str, None], transcript: Transcript) -> AsyncGenerator[Line, None]:
    """OpenAI's events. The transcript gets the text; the rest of it is known when the deltas have ended."""
    async with aclosing(deltas):
        async for delta in deltas:
            transcript.text += delta
            yield sse_line({"type": "transcript.text.delta", "delta": delta})
    usage = transcript.usage.model_dump(exclude_none=True)
    done: Data = {"type": "transcript.text.done", "text": transcript.text, "usage": usage}
    yield sse_line(done if transcript.finish_reason is None else done | {"finish_reason": transcript.finish_reason})


async def read_texts(answer: AsyncGenerator[ChatDelta, None], transcript: Transcript) -> AsyncGenerator[str, None]:
    """The texts of an answer; the transcript gets its usage and finish reason."""
    async with aclosing(answer):
        async for delta in answer:
            if delta.usage:
                transcript.usage = token_usage(UsageInfo(**delta.usage))
            transcript.finish_reason = delta.finish_reason or transcript.finish_reason
            if delta.text:
                yield delta.text


def can_transcribe(client: OmniEngineClient) -> bool:
    """Whether the pipeline's model accepts audio and outputs text."""
    return "text" in client.config.output_types and max_parts(client, "audio") > 0


def max_parts(client: OmniEngineClient, kind: str) -> int:
    """How many media of a kind, as `audio`, the model reads in one prompt."""
    processor = client.renderer.mm_processor if client.has_renderer else None
    return 0 if processor is None else processor.info.allowed_mm_limits.get(kind, 0)


def accepts_audio(client: OmniEngineClient) -> bool:
    """Whether a chat may have sounds: for the model, or for an ASR stage."""
    return can_transcribe(client) or client.config.accepting_stage("audio", "text") is not None


class ServingTranscriptions(TranscriptionHandler):
    """The handler for a model that is asked in a chat."""

    def __init__(self, chat: OmniServingChat, args: Namespace) -> None:
        super().__init__(chat.client, args)
        self._chat = chat

    async def create(self, request: TranscriptionRequest, task: Task, raw_request: Request) -> Response:
        duration = await self._measure(request) if request.response_format == "verbose_json" else 0.0
        chat = request.as_chat(stage_prompt(self._chat.client, task))
        try:
            answer = await self._chat.create_chat_completion(chat, raw_request)
            if isinstance(answer, AsyncGenerator):
                await RequestContext.of(raw_request).started()
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            if error.parameter == "audio_url":
                error.parameter = "file"
            raise
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), answer.error.code)
        if isinstance(answer, ChatCompletionResponse):
            choice = answer.choices[0]
            text, reason = choice.message.content or "", choice.finish_reason or "stop"
            transcript = Transcript(text=text, usage=token_usage(answer.usage), finish_reason=reason)
            return transcript.as_answer(request, task, duration)
        return lines_as_events(answer, RequestContext.of(raw_request), self._keep_alive_s)

    async def _measure(self, request: TranscriptionRequest) -> float:
        """Seconds of the sound, which the request then has as data: an address is fetched once."""
        samples, sample_rate = await self._media.sound(request.file, "file")
        request.file = await asyncio.to_thread(_as_data_uri, samples, sample_rate)
        return len(samples) / sample_rate


class StageTranscriptions(TranscriptionHandler):
    """The handler for a pipeline with an ASR stage, which gets `language`, `prompt`, `temperature` and `task` if it has
    parameters of these names."""

    def __init__(self, state: State, client: OmniEngineClient, stage: ASRStage, args: Namespace) -> None:
        super().__init__(client, args)
        self._stage = stage
        self._model_names = served_names(state)

    async def create(self, request: TranscriptionRequest, task: Task, raw_request: Request) -> Response:
        check_model(request.model, self._model_names)
        if task == "translate" and "task" not in self._stage.parameters:
            raise VLLMValidationError("this model transcribes and does not translate", parameter="model")
        sound = await self._media.sound(request.file, "file")
        seconds = len(sound[0]) / sound[1]
        headers = extract_trace_headers(raw_request.headers)
        request_id = new_id("transcription", raw_request)
        settings = self._settings(request, task)
        deltas = await started(self._stage.transcribe(sound, settings, request_id, trace_headers=headers))
        transcript = Transcript(usage=UsageDuration(type="duration", seconds=seconds))
        if request.stream:
            return sse_response(as_events(deltas, transcript), self._keep_alive_s)
        async with aclosing(deltas):
            transcript.text = "".join([delta async for delta in deltas]).strip()
        return transcript.as_answer(request, task, seconds)

    def _settings(self, request: TranscriptionRequest, task: Task) -> dict[str, Any]:
        given: dict[str, Any] = {"language": request.language, "prompt": request.prompt, "task": task}
        if "temperature" in request.model_fields_set:
            given["temperature"] = request.temperature
        return self._stage.settings(given)


def stage_prompt(client: OmniEngineClient, task: Task) -> str:
    """What the stage that reads prompts states for a task."""
    assert client.stage is not None
    return client.stage.transcription_prompt if task == "transcribe" else client.stage.translation_prompt


def _as_data_uri(samples: np.ndarray, sample_rate: float) -> str:
    return f"data:audio/wav;base64,{to_base64(as_wav(samples, sample_rate))}"


def as_wav(samples: np.ndarray, sample_rate: float) -> bytes:
    """float32 `[n]` as a file; no sample is changed."""
    file = io.BytesIO()
    soundfile.write(file, samples, int(sample_rate), format="WAV", subtype="FLOAT")
    return file.getvalue()


def _handler(raw_request: Request) -> TranscriptionHandler:
    handler = raw_request.app.state.omni_transcriptions
    if handler is None:
        raise VLLMValidationError("this model does not transcribe speech", parameter="model")
    return handler


async def _sound_request(raw_request: Request) -> SoundRequest:
    request = await _handler(raw_request).request_class.read(raw_request)
    state = raw_request.app.state
    is_alias = request.model in model_aliases(state.args, "transcription")
    if is_alias and request.model not in state.openai_serving_models.lora_requests:
        request.model = None  # the one that is served
    return request


router = APIRouter()
_BODY = TimedTranscriptionRequest.describe_body()


@router.post("/v1/audio/transcriptions", responses=RESPONSES, openapi_extra=_BODY)
@model_route
async def create_transcription(
    request: Annotated[SoundRequest, Depends(_sound_request)], raw_request: Request
) -> Response:
    """The transcript of a sound."""
    return await _handler(raw_request).create(request, "transcribe", raw_request)


@router.post("/v1/audio/translations", responses=RESPONSES, openapi_extra=_BODY)
@model_route
async def create_translation(
    request: Annotated[SoundRequest, Depends(_sound_request)], raw_request: Request
) -> Response:
    """The transcript of a sound, in English."""
    return await _handler(raw_request).create(request, "translate", raw_request)
