# SPDX-License-Identifier: Apache-2.0
"""Transcriptions and translations by vLLM's own handlers, for a model that vLLM transcribes with, such as Whisper.

vLLM's handlers run the engine and read the model's times. Here are the media rules of this server before them, the
clips and prompts of a stage that transcribes in them, and OpenAI's formats and events behind them.
"""

from __future__ import annotations

import asyncio
import copy
import io
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import State, UploadFile
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.serve.engine.typing import SpeechToTextRequest
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing, SpeechToTextSegment
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest as VllmTranscriptionRequest
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest as VllmTranslationRequest
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.input_processor import parse_model_prompt
from vllm_omni.engine.transcription import (
    TIME_STEP_S,
    ClipText,
    TimedVocabulary,
    Transcription,
    keep_prompts,
    without_times,
)
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import returned_error
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import read_chunk
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta, text_fields
from vllm_omni.entrypoints.openai.subtitles import SUBTITLES
from vllm_omni.entrypoints.openai.transcription_request import Task, TimedTranscriptionRequest
from vllm_omni.entrypoints.openai.transcriptions import ServingTranscriptions, Transcript, token_usage
from vllm_omni.inputs import TranscriptionParameters
from vllm_omni.vllm_protocol import ErrorResponse, UsageInfo


class _Transcriber(SpeechToTextBaseServing):
    """vLLM's handler with the clips, prompts and texts of a stage that transcribes, see `engine/transcription.py`.

    A copy of it is made for each request. The methods can go with the first vLLM whose own do what theirs say; those of
    0.32 and 0.33 do not.
    """

    transcription: Transcription
    engine_client: Any
    _clips: list[ClipText]

    def for_request(self) -> Self:
        """A copy of the handler for one request."""
        made = copy.copy(self)
        made._clips = []
        made.engine_client = _ClipClient(self.engine_client, made)
        return made

    @property
    def text(self) -> str | None:
        """The whole text, once all clips have ended, in every format the same. None: it is vLLM's."""
        if self.transcription.vocabulary is None:
            return None
        return self.transcription.separator.join(clip.text.strip() for clip in self._clips if clip.text.strip())

    async def _preprocess_speech_to_text(
        self, request: SpeechToTextRequest, audio_data: Any, request_id: str
    ) -> tuple[list[EngineInput], float, list[float]]:
        """Long sounds are cut where nobody speaks, and `prompt` stands behind a token of the vocabulary.

        Args:
            audio_data: Samples and their rate.
        """
        parameters = TranscriptionParameters(language=request.language, prompt=request.prompt, task=self.task_type)
        tokenizer = self.renderer.get_tokenizer()
        try:
            sound, sample_rate = audio_data
            made = await asyncio.to_thread(
                Transcription, self.model_config, tokenizer, sound, sample_rate, parameters, writes_times=True
            )
        except ValueError as error:
            field = "language" if self.task_type == "transcribe" else "model"
            raise VLLMValidationError(str(error), parameter=field) from error
        self.transcription = made
        if made.needs_language:
            made.language = await self._detect_language(made.clips[0], f"{request_id}-lang_detect")
        request.language = made.language
        prompts = [parse_model_prompt(self.model_config, made.prompt(index)) for index in range(len(made.clips))]
        return await self.renderer.render_cmpl_async(prompts), made.seconds, made.starts

    def _get_verbose_segments(
        self,
        tokens: tuple[int, ...],
        log_probs: Any,
        request: SpeechToTextRequest,
        segment_class: type[SpeechToTextSegment],
        start_time: float = 0,
    ) -> list[SpeechToTextSegment]:
        """What follows the last time of a clip is a segment, too, up to the clip's end. vLLM drops it: where a clip has
        no other segment, the whole. A clip in which nobody speaks has none."""
        index = self.transcription.starts.index(start_time)
        vocabulary = self.transcription.vocabulary
        assert vocabulary is not None and vocabulary.first_time is not None
        if self._clips[index].is_silent:
            return []
        if tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens[:-1]
        log_probs = list(log_probs)[: len(tokens)]
        if tokens and tokens[-1] < vocabulary.first_time:
            starts = [*self.transcription.starts, self.transcription.seconds]
            end = vocabulary.first_time + round((starts[index + 1] - start_time) / TIME_STEP_S)
            tokens, log_probs = (*tokens, end), [*log_probs, {end: Logprob(0.0)}]
        if not tokens:
            return []
        segments = super()._get_verbose_segments(tokens, log_probs, request, segment_class, start_time)
        for segment in segments:
            segment.text = without_times(segment.text)
            segment.no_speech_prob = self._clips[index].no_speech_prob
        return [segment for segment in segments if segment.text.strip()]


class _Transcribing(_Transcriber, OpenAIServingTranscription):
    """Writes the language that is spoken."""


class _Translating(_Transcriber, OpenAIServingTranslation):
    """Writes English."""


_METHODS: dict[Task, str] = {"transcribe": "create_transcription", "translate": "create_translation"}


class _ClipClient:
    """The engine as a handler of one request calls it: its outputs have the text of `ClipText`."""

    def __init__(self, client: OmniEngineClient, handler: _Transcriber) -> None:
        self._client = client
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: EngineInput, params: SamplingParams, request_id: str, **options: Any) -> Any:
        if params.allowed_token_ids is not None:  # It finds the language.
            return self._client.generate(prompt, params, request_id, **options)
        transcription = self._handler.transcription
        if transcription.vocabulary is None:
            return self._client.generate(prompt, params, request_id, **options)
        clip = transcription.clip_text(len(self._handler._clips))
        self._handler._clips.append(clip)
        params = transcription.with_settings(params)
        return _read(self._client.generate(prompt, params, request_id, **options), clip)


async def _read(outputs: AsyncGenerator[Any, None], clip: ClipText) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            output.outputs[0].text = clip.take(output)
            yield output


class VllmTranscriptions(ServingTranscriptions):
    """vLLM's handlers, made anew with the clips and texts of `Transcription`."""

    request_class = TimedTranscriptionRequest

    def __init__(self, state: State, client: OmniEngineClient, args: Namespace) -> None:
        super().__init__(client, args)
        made = state.openai_serving_transcription
        logger = made.request_logger
        self._handlers: dict[Task, _Transcriber] = {
            "transcribe": _Transcribing(client, made.models, request_logger=logger),
            "translate": _Translating(client, made.models, request_logger=logger),
        }
        for handler in self._handlers.values():
            handler.default_sampling_params = client.default_sampling_params
            handler.create_error_response = returned_error  # type: ignore[method-assign]
        keep_prompts(client.renderer)
        vocabulary = TimedVocabulary.load(client.model_config, client.renderer.get_tokenizer())
        self._knows_times = vocabulary is not None and vocabulary.first_time is not None

    async def transcribe(
        self, request: TimedTranscriptionRequest, task: Task, raw_request: Request
    ) -> Transcript | ErrorResponse:
        if request.has_times and not self._knows_times:
            raise VLLMValidationError(
                f"response_format {request.response_format} is not supported: this model says what is spoken, not "
                "when; it may be json or text",
                parameter="response_format",
            )
        sound = await self._media.sound(request.file, "file")
        handler: Any = self._handlers[task].for_request()
        run = getattr(handler, _METHODS[task])
        answer = await run(sound, _as_vllm(request, task), raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, AsyncGenerator):
            context = RequestContext.of(raw_request)
            await context.started()
            return Transcript(usage=token_usage(UsageInfo()), deltas=_read_deltas(answer, context))
        answer.text = answer.text if handler.text is None else handler.text
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
        segments = [{**segment, "id": index} for index, segment in enumerate(fields.get("segments", []))]
        if request.response_format != "verbose_json":
            return PlainTextResponse(SUBTITLES[request.response_format](segments))
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
