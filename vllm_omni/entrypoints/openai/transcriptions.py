# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions and /v1/audio/translations, as in OpenAI's API.

One handler, with one of three sources of the text. Of an omni model it is that of a chat of one message: the sound, and
the request to transcribe it, in the words that its stage's configuration states. A pipeline with an ASR stage runs that
alone. A model that vLLM transcribes with, such as Whisper, has vLLM's handlers, see `vllm_transcriptions.py`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageDuration, UsageTokens
from openai.types.audio.transcription_verbose import Usage as VerboseUsage
from starlette.datastructures import State
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.entrypoints.openai.asr_stage import TIMESTAMPS, ASRStage, TimedDelta
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import check_model, model_aliases, new_id, served_names
from vllm_omni.entrypoints.openai.media_output import FINISH_REASON_HEADER
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route, started
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, Data, Line, sse_line, sse_response
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.entrypoints.openai.subtitles import SUBTITLES, as_segments
from vllm_omni.entrypoints.openai.transcription_request import (
    SoundRequest,
    Task,
    TimedTranscriptionRequest,
    TranscriptionRequest,
    WordTimedTranscriptionRequest,
)
from vllm_omni.vllm_protocol import ChatCompletionResponse, ErrorResponse, UsageInfo

RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": Transcription, "content": {"text/plain": {}, MEDIA_TYPE: {}}},
    **FORM_ERRORS,
}


@dataclass(kw_only=True)
class Transcript:
    """The text so far, and what is known with its last delta.

    Attributes:
        finish_reason: An ASR stage gives none.
        seconds: The length of the sound, for `verbose_json`.
        words: With times, of a model that knows them and was asked; as OpenAI's `words`.
        deltas: Of the text that is still to come.
    """

    text: str = ""
    usage: UsageTokens | UsageDuration
    finish_reason: str | None = None
    seconds: float = 0.0
    words: list[dict[str, Any]] = field(default_factory=list)
    deltas: AsyncGenerator[ChatDelta, None] | None = None

    async def read(self) -> AsyncGenerator[str, None]:
        """The texts of the deltas."""
        assert self.deltas is not None
        async with aclosing(self.deltas) as deltas:
            async for delta in deltas:
                if delta.usage:
                    self.usage = token_usage(UsageInfo(**delta.usage))
                self.finish_reason = delta.finish_reason or self.finish_reason
                if isinstance(delta, TimedDelta):
                    times = zip(delta.text.split(), delta.word_times, strict=False)
                    self.words += [{"word": word, "start": start, "end": end} for word, (start, end) in times]
                if delta.text:
                    self.text += delta.text
                    yield delta.text

    async def as_events(self) -> AsyncGenerator[Line, None]:
        """OpenAI's events."""
        async with aclosing(self.read()) as texts:
            async for text in texts:
                yield sse_line({"type": "transcript.text.delta", "delta": text})
        usage = self.usage.model_dump(exclude_none=True)
        done: Data = {"type": "transcript.text.done", "text": self.text, "usage": usage}
        yield sse_line(done if self.finish_reason is None else done | {"finish_reason": self.finish_reason})

    def as_answer(self, request: Any, task: Task) -> Response:
        """The whole, in the format of the request. It has segments only if the model knows the times of words."""
        headers = {} if self.finish_reason is None else {FINISH_REASON_HEADER: self.finish_reason}
        if request.response_format == "text":
            return PlainTextResponse(self.text, headers=headers)
        if request.response_format == "json":
            whole = Transcription(text=self.text, usage=self.usage)
            return JSONResponse(whole.model_dump(exclude_none=True), headers=headers)
        if request.response_format in SUBTITLES:
            return PlainTextResponse(SUBTITLES[request.response_format](as_segments(self.words)), headers=headers)
        language = "" if request.language is None else LANGUAGES[request.language]
        usage = VerboseUsage(type="duration", seconds=self.seconds)
        verbose = TranscriptionVerbose(text=self.text, duration=self.seconds, language=language, usage=usage)
        answer = {"task": task, **verbose.model_dump(exclude_none=True)}
        if request.has_word_times:
            if "word" in request.timestamp_granularities:
                answer["words"] = self.words
            if request.timestamp_granularities != ["word"]:
                answer["segments"] = as_segments(self.words)
        return JSONResponse(answer, headers=headers)


class ServingTranscriptions:
    """The handler of both endpoints. A derived class has a source of the text.

    Attributes:
        request_class: The requests that it takes.
    """

    request_class: type[SoundRequest] = TranscriptionRequest

    def __init__(self, client: OmniEngineClient, args: Namespace) -> None:
        self._media = MediaFetcher(client, args)
        self._keep_alive_s = float(args.sse_keep_alive_interval)

    async def create(self, request: SoundRequest, task: Task, raw_request: Request) -> Response:
        """Raises as `transcribe`."""
        transcript = await self.transcribe(request, task, raw_request)
        if isinstance(transcript, ErrorResponse):
            return JSONResponse(transcript.model_dump(), transcript.error.code)
        if request.stream:
            return sse_response(transcript.as_events(), self._keep_alive_s)
        return transcript.as_answer(request, task)

    async def transcribe(self, request: Any, task: Task, raw_request: Request) -> Transcript | ErrorResponse:
        """The whole; of a request for a stream its deltas, as soon as there is a first one.

        Raises:
            VLLMClientError: The request is wrong.
            OmniError: It failed.
        """
        raise NotImplementedError


def token_usage(usage: UsageInfo) -> UsageTokens:
    return UsageTokens(
        type="tokens",
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        total_tokens=usage.total_tokens,
    )


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


class ChatTranscriptions(ServingTranscriptions):
    """A model that is asked in a chat."""

    def __init__(self, chat: OmniServingChat, args: Namespace) -> None:
        super().__init__(chat.client, args)
        self._chat = chat

    async def transcribe(
        self, request: TranscriptionRequest, task: Task, raw_request: Request
    ) -> Transcript | ErrorResponse:
        context = RequestContext.of(raw_request)
        seconds = 0.0
        if request.response_format == "verbose_json":
            sound = await self._media.sound(request.file, "file")
            seconds = len(sound[0]) / sound[1]
            context.kept_sounds = {request.file: lambda: sound}
        chat = request.as_chat(stage_prompt(self._chat.client, task))
        create = self._chat.create_deltas if request.stream else self._chat.create_chat_completion
        try:
            answer: Any = await create(chat, raw_request)
            if isinstance(answer, AsyncGenerator):
                await context.started()
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            if error.parameter == "audio_url":
                error.parameter = "file"
            raise
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, ChatCompletionResponse):
            choice = answer.choices[0]
            text, reason = choice.message.content or "", choice.finish_reason or "stop"
            return Transcript(text=text, usage=token_usage(answer.usage), finish_reason=reason, seconds=seconds)
        return Transcript(usage=token_usage(UsageInfo()), deltas=answer)


class StageTranscriptions(ServingTranscriptions):
    """An ASR stage, which gets `language`, `prompt`, `temperature` and `task` if it has parameters of these names."""

    def __init__(self, state: State, client: OmniEngineClient, stage: ASRStage, args: Namespace) -> None:
        super().__init__(client, args)
        self._stage = stage
        self._model_names = served_names(state)
        self._has_times = TIMESTAMPS in stage.parameters
        self.request_class = WordTimedTranscriptionRequest if self._has_times else TranscriptionRequest

    async def transcribe(self, request: SoundRequest, task: Task, raw_request: Request) -> Transcript:
        check_model(request.model, self._model_names)
        if task == "translate" and "task" not in self._stage.parameters:
            raise VLLMValidationError("this model transcribes and does not translate", parameter="model")
        sound = await self._media.sound(request.file, "file")
        seconds = len(sound[0]) / sound[1]
        headers = extract_trace_headers(raw_request.headers)
        request_id = new_id("transcription", raw_request)
        settings = self._settings(request, task)
        deltas = await started(self._stage.transcribe(sound, settings, request_id, trace_headers=headers))
        usage = UsageDuration(type="duration", seconds=seconds)
        transcript = Transcript(usage=usage, seconds=seconds, deltas=deltas)
        if not request.stream:
            transcript.text = "".join([text async for text in transcript.read()]).strip()
        return transcript

    def _settings(self, request: SoundRequest, task: Task) -> dict[str, Any]:
        given: dict[str, Any] = {"language": request.language, "prompt": request.prompt, "task": task}
        if "temperature" in request.model_fields_set:
            given["temperature"] = request.temperature
        if self._has_times:
            given[TIMESTAMPS] = request.response_format in ("verbose_json", *SUBTITLES)
        return self._stage.settings(given)


def stage_prompt(client: OmniEngineClient, task: Task) -> str:
    """What the stage that reads prompts states for a task."""
    assert client.stage is not None
    return client.stage.transcription_prompt if task == "transcribe" else client.stage.translation_prompt


def _handler(raw_request: Request) -> ServingTranscriptions:
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
