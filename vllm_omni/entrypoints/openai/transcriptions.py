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
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
import soundfile
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from openai.types.audio.transcription import Transcription, UsageDuration
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import check_model, model_aliases, new_id, served_names
from vllm_omni.entrypoints.openai.media_output import to_base64
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.request_context import RequestContext, started
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, sse_response
from vllm_omni.entrypoints.openai.transcription_request import (
    SoundRequest,
    Task,
    TimedTranscriptionRequest,
    TranscriptionRequest,
)
from vllm_omni.entrypoints.openai.transcripts import Transcript, as_events, lines_as_events, token_usage

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


def can_transcribe(client: OmniEngineClient) -> bool:
    """Whether the pipeline's model accepts audio and outputs text."""
    if not client.has_renderer or "text" not in client.config.output_types:
        return False
    processor = client.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("audio", 0) > 0


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
