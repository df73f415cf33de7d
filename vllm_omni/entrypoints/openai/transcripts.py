# SPDX-License-Identifier: Apache-2.0
"""Transcripts in OpenAI's formats, whoever transcribes: whole answers, and server-sent events over text deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageDuration, UsageTokens
from openai.types.audio.transcription_verbose import Usage as VerboseUsage
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from vllm_omni.entrypoints.openai.media_output import FINISH_REASON_HEADER
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import ChatDelta, Data, Line, read_deltas, sse_line, sse_response
from vllm_omni.entrypoints.openai.transcription_request import Task, TranscriptionRequest

Deltas = AsyncGenerator[str, None]


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


async def as_events(deltas: Deltas, transcript: Transcript) -> AsyncGenerator[Line, None]:
    """OpenAI's events. The transcript gets the text; the rest of it is known when the deltas have ended."""
    async with aclosing(deltas):
        async for delta in deltas:
            transcript.text += delta
            yield sse_line({"type": "transcript.text.delta", "delta": delta})
    usage = transcript.usage.model_dump(exclude_none=True)
    done: Data = {"type": "transcript.text.done", "text": transcript.text, "usage": usage}
    yield sse_line(done if transcript.finish_reason is None else done | {"finish_reason": transcript.finish_reason})


async def read_texts(answer: AsyncGenerator[ChatDelta, None], transcript: Transcript) -> Deltas:
    """The texts of an answer; the transcript gets its usage and finish reason."""
    async with aclosing(answer):
        async for delta in answer:
            if delta.usage:
                transcript.usage = token_usage(UsageInfo(**delta.usage))
            transcript.finish_reason = delta.finish_reason or transcript.finish_reason
            if delta.text:
                yield delta.text
