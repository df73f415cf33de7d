# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions, as in OpenAI's API, for a pipeline whose model hears and writes.

A transcription is a chat of one message, the sound and the request to transcribe it. vLLM's own handler is for models
that declare their transcription prompt, which few chat models do, and its streams are not OpenAI's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
from openai.types.audio.transcription import Transcription, UsageTokens
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

from vllm_omni.entrypoints.openai.chat import Line, OmniChatCompletionRequest, OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.images import RESPONSES as FORM_RESPONSES
from vllm_omni.entrypoints.openai.media_request import (
    RequestModel,
    SoundUrl,
    describe_form,
    read_request,
    without_nulls,
)
from vllm_omni.entrypoints.openai.media_stage import model_aliases
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.speech import FINISH_REASON_HEADER, ClosingResponse, sse_line

_NO_TIMES = "this server's models say what is spoken, not when"
_NO_DIARIZATION = "this server's models do not tell who speaks"
_UNSUPPORTED_FIELDS = {
    "timestamp_granularities": _NO_TIMES,
    "include": "log probabilities are not returned with transcriptions; /v1/chat/completions has them",
    "known_speaker_names": _NO_DIARIZATION,
    "known_speaker_references": _NO_DIARIZATION,
    "keywords": "name them in prompt",
    "languages": "name one as language, or leave it out",
}
_UNSUPPORTED_FORMATS = {
    "verbose_json": _NO_TIMES,
    "srt": _NO_TIMES,
    "vtt": _NO_TIMES,
    "diarized_json": _NO_DIARIZATION,
}

RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": Transcription, "content": {"text/plain": {}, "text/event-stream": {}}},
    **FORM_RESPONSES,
}


def _check_language(code: str) -> str:
    if code.lower() not in LANGUAGES:
        raise ValueError(f"unknown language {code!r}; it is an ISO 639-1 code, such as en or zh")
    return code.lower()


class TranscriptionRequest(RequestModel):
    """Speech to be written down."""

    model_config = ConfigDict(extra="forbid")

    file: SoundUrl = Field(description="The sound: a file in a form; in JSON a data URI or an address.")
    model: str | None = Field(None, description="A name of GET /v1/models; default: the model that is served.")
    language: Annotated[str, AfterValidator(_check_language)] | None = Field(
        None, description="The language that is spoken, as an ISO 639-1 code.", examples=["en"]
    )
    prompt: str | None = Field(
        None, max_length=4096, description="Names and words that occur, style, or what was said before."
    )
    response_format: Literal["json", "text"] = "json"
    temperature: float = Field(0.0, ge=0, le=1, description="0: the likeliest text.")
    stream: bool = Field(False, description="Server-sent events with the text as it is written.")
    chunking_strategy: Literal["auto"] | None = Field(None, description="The sound is always read as a whole.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        """OpenAI's fields and values that would change the result."""
        if not isinstance(fields, Mapping):
            return fields
        for name in without_nulls(fields):
            base = str(name).partition("[")[0]  # Forms have include[] and chunking_strategy[type].
            if base == "chunking_strategy" and fields[name] != "auto":
                raise VLLMValidationError("a sound is always read as a whole; leave it out", parameter=base)
            if reason := _UNSUPPORTED_FIELDS.get(base):
                raise VLLMValidationError(f"{base} is not supported: {reason}", parameter=base)
        wanted = fields.get("response_format")
        if isinstance(wanted, str) and (reason := _UNSUPPORTED_FORMATS.get(wanted)):
            raise VLLMValidationError(
                f"response_format {wanted} is not supported: {reason}; it may be json or text",
                parameter="response_format",
            )
        return fields

    @property
    def instruction(self) -> str:
        """The request to the model."""
        language = "" if self.language is None else f"{LANGUAGES[self.language].title()} "
        instruction = f"Transcribe the {language}audio into text."
        return f"{instruction} {self.prompt}" if self.prompt else instruction

    def as_chat(self) -> OmniChatCompletionRequest:
        """The request for its text."""
        content = [
            {"type": "audio_url", "audio_url": {"url": self.file}},
            {"type": "text", "text": self.instruction},
        ]
        return OmniChatCompletionRequest.model_validate(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "modalities": ["text"],
                "temperature": self.temperature,
                "stream": self.stream,
                "stream_options": {"include_usage": True} if self.stream else None,
            }
        )


def can_transcribe(client: OmniEngineClient) -> bool:
    """Whether the pipeline's model hears and writes."""
    if not client.has_renderer or "text" not in client.config.output_types:
        return False
    processor = client.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("audio", 0) > 0


class ServingTranscriptions:
    """The handler of the endpoint."""

    def __init__(self, chat: OmniServingChat, args: Namespace) -> None:
        self._chat = chat
        self._keep_alive_s = float(args.sse_keep_alive_interval)
        self._aliases = model_aliases(args, "transcription")

    async def create(self, request: TranscriptionRequest, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        if request.model and request.model in self._aliases and not self._is_served(request.model):
            request.model = None  # the one that is served
        try:
            answer = await self._chat.create_chat_completion(request.as_chat(), raw_request)
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            if error.parameter == "audio_url":
                error.parameter = "file"
            raise
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), answer.error.code)
        if isinstance(answer, ChatCompletionResponse):
            return _whole(answer, request.response_format)
        lines = with_sse_keep_alive(_events(answer, RequestContext.current()), self._keep_alive_s)
        return ClosingResponse(lines, "text/event-stream", {})

    def _is_served(self, name: str) -> bool:
        return self._chat.models.is_base_model(name) or name in self._chat.models.lora_requests


def _whole(answer: ChatCompletionResponse, response_format: str) -> Response:
    choice = answer.choices[0]
    text = choice.message.content or ""
    headers = {FINISH_REASON_HEADER: choice.finish_reason or "stop"}
    if response_format == "text":
        return PlainTextResponse(text, headers=headers)
    whole = Transcription(text=text, usage=_tokens(answer.usage))
    return JSONResponse(whole.model_dump(exclude_none=True), headers=headers)


async def _events(lines: AsyncGenerator[Line, None], context: RequestContext) -> AsyncGenerator[str, None]:
    """OpenAI's server-sent events of vLLM's lines of a chat; an error is the last of them.

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
                    reason = choice["finish_reason"] or reason
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


async def _transcription_request(raw_request: Request) -> TranscriptionRequest:
    return await read_request(raw_request, TranscriptionRequest, "file")


router = APIRouter()


@router.post(
    "/v1/audio/transcriptions",
    responses=RESPONSES,
    openapi_extra=describe_form(TranscriptionRequest, "file", several=False),
)
@with_cancellation
@load_aware_call
async def create_transcription(
    request: Annotated[TranscriptionRequest, Depends(_transcription_request)], raw_request: Request
) -> Response:
    """What is said in a sound."""
    handler = raw_request.app.state.omni_transcriptions
    if handler is None:
        raise VLLMValidationError("this model does not understand speech and write what it hears", parameter="model")
    return await handler.create(request, raw_request)
