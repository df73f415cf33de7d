# SPDX-License-Identifier: Apache-2.0
"""Transcripts in OpenAI's formats, whoever transcribes: whole answers, and server-sent events over text deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription import Transcription, UsageDuration, UsageTokens
from openai.types.audio.transcription_verbose import Usage as VerboseUsage
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.chat_media import Line
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.speech import FINISH_REASON_HEADER, ClosingResponse, sse_line
from vllm_omni.entrypoints.openai.transcription_request import Task, TranscriptionRequest
from vllm_omni.errors import OmniError

Data = dict[str, Any]
Deltas = AsyncGenerator[str, None]


class ErrorLine(Exception):
    """vLLM ended a stream with an error; the argument is its line, decoded."""


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


def as_events(deltas: Deltas, transcript: Transcript, keep_alive_s: float) -> Response:
    """OpenAI's server-sent events; an error is the last of them.

    Args:
        deltas: May raise `OmniError` or `ErrorLine`.
        transcript: Gets the text; the rest is known when the deltas have ended.
    """
    events = with_sse_keep_alive(_events(deltas, transcript), keep_alive_s)
    return ClosingResponse(events, "text/event-stream", {})


def lines_as_events(lines: AsyncGenerator[Line, None], keep_alive_s: float) -> Response:
    """The answer of `as_events` for vLLM's lines of a chat or a transcription."""
    transcript = Transcript(usage=token_usage(UsageInfo()))
    deltas = read_deltas(read_lines(lines, RequestContext.current()), transcript)
    return as_events(deltas, transcript, keep_alive_s)


async def _events(deltas: Deltas, transcript: Transcript) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                transcript.text += delta
                yield sse_line({"type": "transcript.text.delta", "delta": delta})
    except ErrorLine as error:
        yield "event: error\n" + sse_line(error.args[0])
    except OmniError as error:
        yield "event: error\n" + sse_line(create_error_response(to_http_error(error)).model_dump())
    else:
        usage = transcript.usage.model_dump(exclude_none=True)
        done: Data = {"type": "transcript.text.done", "text": transcript.text, "usage": usage}
        yield sse_line(done if transcript.finish_reason is None else done | {"finish_reason": transcript.finish_reason})


async def read_lines(lines: AsyncGenerator[Line, None], context: RequestContext) -> AsyncGenerator[Data, None]:
    """The chunks of vLLM's lines. Raises `ErrorLine`. vLLM does not close the outputs that it reads; this does."""
    try:
        async with aclosing(lines):
            async for line in lines:
                encoded = line.encode() if isinstance(line, str) else line
                if not encoded.startswith(b"data: {"):
                    continue  # The mark of the end.
                chunk = msgspec.json.decode(encoded[6:])
                if "error" in chunk:
                    raise ErrorLine(chunk)
                yield chunk
    finally:
        await context.abort()


async def read_deltas(chunks: AsyncGenerator[Data, None], transcript: Transcript) -> Deltas:
    """The text of chunks; the transcript gets their usage and finish reason."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.get("usage"):
                transcript.usage = token_usage(UsageInfo(**chunk["usage"]))
            for choice in chunk["choices"]:
                transcript.finish_reason = choice.get("finish_reason") or transcript.finish_reason
                if delta := choice["delta"].get("content"):
                    yield delta
