# SPDX-License-Identifier: Apache-2.0
"""The lines of a chat read as typed deltas, for answers that are not a chat: transcripts and realtime responses."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import Data, ErrorLine, Line, read_line


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """What a line of a chat adds to its only choice.

    Attributes:
        text: Of the content.
        tool_calls: Deltas of calls, as OpenAI's.
        audio: Of the file of the speech.
        finish_reason: Of the last one.
        usage: So far, as OpenAI's, if the line has it.
        mm_token_counts, num_cached_tokens: See `RequestContext`.
    """

    text: str = ""
    tool_calls: Sequence[Data] = ()
    audio: bytes = b""
    finish_reason: str | None = None
    usage: Data | None = None
    mm_token_counts: Mapping[str, int]
    num_cached_tokens: int = 0


async def read_deltas(lines: AsyncGenerator[Line, None], context: RequestContext) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of a chat, or of a transcription of vLLM's.

    Args:
        context: Its requests to the engine end with the lines: vLLM does not close the outputs that it reads.

    Raises:
        ErrorLine: The stream ended with an error.
    """
    try:
        async with aclosing(lines):
            async for line in lines:
                if line[:7] in ("data: {", b"data: {"):  # no comment, no mark of the end
                    yield _as_delta(read_line(line), context)
    finally:
        await context.abort()


def _as_delta(chunk: Data, context: RequestContext) -> ChatDelta:
    if "error" in chunk:
        raise ErrorLine(chunk)
    (choice,) = chunk["choices"] or [{}]
    delta = choice.get("delta", {})
    return ChatDelta(
        text=delta.get("content") or "",
        tool_calls=delta.get("tool_calls") or (),
        audio=base64.b64decode((delta.get("audio") or {}).get("data", "")),
        finish_reason=choice.get("finish_reason"),
        usage=chunk.get("usage"),
        mm_token_counts=context.mm_token_counts,
        num_cached_tokens=context.num_cached_tokens,
    )
