# SPDX-License-Identifier: Apache-2.0
"""Transcriptions by the ASR stage of a pipeline, without the rest of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageDuration
from openai.types.audio.transcription_verbose import Usage as VerboseUsage
from starlette.datastructures import State
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.media_stage import check_model, new_id, served_names
from vllm_omni.entrypoints.openai.request_context import started
from vllm_omni.entrypoints.openai.speech import ClosingResponse, sse_line
from vllm_omni.entrypoints.openai.transcription_request import SoundRequest, Task, TranscriptionRequest
from vllm_omni.errors import OmniError


class StageTranscriptions:
    """The handler. `language`, `prompt`, `temperature` and `task` reach a stage that declares them."""

    request_class: type[SoundRequest] = TranscriptionRequest

    def __init__(self, state: State, stage: ASRStage, args: Namespace) -> None:
        self._stage = stage
        self._model_names = served_names(state)
        self._keep_alive_s = float(args.sse_keep_alive_interval)

    async def create(self, request: TranscriptionRequest, task: Task, raw_request: Request) -> Response:
        """See `TranscriptionHandler`."""
        check_model(request.model, self._model_names)
        if task == "translate" and "task" not in self._stage.parameters:
            raise VLLMValidationError("this model transcribes and does not translate", parameter="model")
        sound = await self._stage.fetch(request.file, "file")
        seconds = len(sound[0]) / sound[1]
        headers = extract_trace_headers(raw_request.headers)
        request_id = new_id("transcription", raw_request)
        settings = self._settings(request, task)
        texts = await started(self._stage.transcribe(sound, settings, request_id, trace_headers=headers))
        if request.stream:
            events = with_sse_keep_alive(_events(texts, seconds), self._keep_alive_s)
            return ClosingResponse(events, "text/event-stream", {})
        async with aclosing(texts):
            text = "".join([each async for each in texts]).strip()
        if request.response_format == "text":
            return PlainTextResponse(text)
        if request.response_format == "verbose_json":
            language = "" if request.language is None else LANGUAGES[request.language]
            usage = VerboseUsage(type="duration", seconds=seconds)
            verbose = TranscriptionVerbose(text=text, duration=seconds, language=language, usage=usage)
            return JSONResponse({"task": task, **verbose.model_dump(exclude_none=True)})
        return JSONResponse(Transcription(text=text, usage=_usage(seconds)).model_dump(exclude_none=True))

    def _settings(self, request: TranscriptionRequest, task: Task) -> dict[str, Any]:
        given: dict[str, Any] = {"language": request.language, "prompt": request.prompt, "task": task}
        if "temperature" in request.model_fields_set:
            given["temperature"] = request.temperature
        return {name: value for name, value in given.items() if value is not None and name in self._stage.parameters}


def _usage(seconds: float) -> UsageDuration:
    return UsageDuration(type="duration", seconds=seconds)


async def _events(texts: AsyncGenerator[str, None], seconds: float) -> AsyncGenerator[str, None]:
    """OpenAI's server-sent events; an error is the last of them."""
    text = ""
    try:
        async with aclosing(texts):
            async for delta in texts:
                text += delta
                yield sse_line({"type": "transcript.text.delta", "delta": delta})
    except OmniError as error:
        yield "event: error\n" + sse_line(create_error_response(to_http_error(error)).model_dump())
        return
    yield sse_line({"type": "transcript.text.done", "text": text, "usage": _usage(seconds).model_dump()})
