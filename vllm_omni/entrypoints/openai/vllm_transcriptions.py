# SPDX-License-Identifier: Apache-2.0
"""Transcriptions and translations by vLLM's own handlers, for a model that vLLM transcribes with, such as Whisper.

vLLM's handlers split a long sound, detect its language and read the model's times. Here are the media rules of this
server before them, and OpenAI's formats and events behind them.
"""

from __future__ import annotations

import asyncio
import io
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import State, UploadFile
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest as VllmTranscriptionRequest
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest as VllmTranslationRequest
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import returned_error
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import read_chunk
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta, text_fields
from vllm_omni.entrypoints.openai.transcription_request import Task, TimedTranscriptionRequest
from vllm_omni.entrypoints.openai.transcriptions import Transcript, TranscriptionSource, as_wav, token_usage
from vllm_omni.vllm_protocol import ErrorResponse, UsageInfo


class VllmSource(TranscriptionSource):
    """The handlers that vLLM has made of the application's state."""

    request_class = TimedTranscriptionRequest

    def __init__(self, state: State, client: OmniEngineClient, args: Namespace) -> None:
        super().__init__(client, args)
        transcription: OpenAIServingTranscription = state.openai_serving_transcription
        translation: OpenAIServingTranslation = state.openai_serving_translation
        for handler in (transcription, translation):
            handler.default_sampling_params = client.default_sampling_params
            handler.create_error_response = returned_error  # type: ignore[method-assign]
        self._run: dict[Task, Callable[..., Awaitable[Any]]] = {
            "transcribe": transcription.create_transcription,
            "translate": translation.create_translation,
        }
        self._knows_times = transcription.model_cls.supports_segment_timestamp

    async def transcribe(
        self, request: TimedTranscriptionRequest, task: Task, raw_request: Request
    ) -> Transcript | ErrorResponse:
        if request.has_times and not self._knows_times:
            raise VLLMValidationError(
                f"response_format {request.response_format} is not supported: this model says what is spoken, not "
                "when; it may be json or text",
                parameter="response_format",
            )
        samples, sample_rate = await self._media.sound(request.file, "file")
        sound = await asyncio.to_thread(as_wav, samples, sample_rate)
        vllm_request = _as_vllm(request, task)
        answer = await self._run[task](sound, vllm_request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, AsyncGenerator):
            context = RequestContext.of(raw_request)
            await context.started()
            return Transcript(usage=token_usage(UsageInfo()), deltas=_read_deltas(answer, context))
        return _VllmTranscript(usage=token_usage(UsageInfo()), answer=answer)


@dataclass(kw_only=True)
class _VllmTranscript(Transcript):
    """vLLM's whole answer, which may have the times of segments."""

    answer: Any

    def as_answer(self, request: TimedTranscriptionRequest, task: Task) -> Response:
        answer = self.answer
        fields = answer.model_dump(exclude_none=True)
        if not request.has_times:
            return PlainTextResponse(answer.text) if request.response_format == "text" else JSONResponse(fields)
        segments = [
            {**segment, "id": index, "no_speech_prob": 0.0} for index, segment in enumerate(fields.get("segments", []))
        ]
        if request.response_format != "verbose_json":
            return PlainTextResponse(_SUBTITLES[request.response_format](segments))
        language = LANGUAGES.get(answer.language, answer.language)  # OpenAI's answers have its name.
        return JSONResponse({"task": task, **fields, "language": language, "segments": segments})


async def _read_deltas(lines: AsyncGenerator[str, None], context: RequestContext) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of vLLM's lines. Raises `ErrorLine` if the stream ended with an error."""
    try:
        async with aclosing(lines):
            async for line in lines:
                if (chunk := read_chunk(line)) is not None:
                    yield ChatDelta(**text_fields(chunk))
    finally:
        await context.abort()  # vLLM does not close the outputs that it reads.


def _as_vllm(request: TimedTranscriptionRequest, task: Task) -> VllmTranscriptionRequest | VllmTranslationRequest:
    fields: dict[str, Any] = {
        "file": UploadFile(io.BytesIO()),  # The handler gets the sound beside the request.
        "model": request.model,
        "language": request.language,
        "prompt": request.prompt or "",
        "response_format": "verbose_json" if request.has_times else "json",
        "temperature": request.temperature,
        "stream": request.stream,
        "stream_include_usage": request.stream,
    }
    if task == "translate":
        return VllmTranslationRequest(**fields, to_language="en")
    return VllmTranscriptionRequest(**fields)


def as_srt(segments: Sequence[dict[str, Any]]) -> str:
    """Segments of `verbose_json` as SubRip subtitles."""
    cues = [
        f"{number}\n{_time(segment['start'], ',')} --> {_time(segment['end'], ',')}\n{segment['text'].strip()}\n"
        for number, segment in enumerate(segments, start=1)
    ]
    return "\n".join(cues)


def as_vtt(segments: Sequence[dict[str, Any]]) -> str:
    """Segments of `verbose_json` as WebVTT subtitles."""
    cues = [
        f"{_time(segment['start'], '.')} --> {_time(segment['end'], '.')}\n{segment['text'].strip()}\n"
        for segment in segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


_SUBTITLES: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {"srt": as_srt, "vtt": as_vtt}


def _time(seconds: float, point: str) -> str:
    """`01:02:03,004`, with `point` before the milliseconds."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{milliseconds:03}"
