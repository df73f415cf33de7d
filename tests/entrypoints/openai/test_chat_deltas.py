# SPDX-License-Identifier: Apache-2.0
"""The lines of a chat, read as deltas."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from vllm_omni.entrypoints.openai.chat_deltas import read_deltas
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext
from vllm_omni.entrypoints.openai.sse import DONE, ErrorLine, Line, comment_line, sse_line

FAILED = {"error": {"message": "it failed", "code": 500}}


async def stream(*lines: Line) -> AsyncGenerator[Line, None]:
    for line in lines:
        yield line


def test_a_chat_is_read_until_an_error_and_its_request_ends() -> None:
    async def main() -> None:
        is_closed = asyncio.Event()

        async def outputs() -> AsyncGenerator[int, None]:
            try:
                while True:
                    yield 0
            finally:
                is_closed.set()

        def line(delta: dict, **more: object) -> bytes:
            return sse_line({"choices": [{"delta": delta, "finish_reason": None}], **more})

        context = RequestContext(outputs=[PrefetchedStream(outputs())], mm_token_counts={"audio": 7})
        await context.started()
        usage = {"total_tokens": 3}
        call = {"index": 0, "id": "call"}
        ends = [
            sse_line({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            sse_line({"choices": [], "usage": usage}),
        ]
        lines = stream(
            line({"content": "é"}).decode(), comment_line("step"), line({"audio": {"id": "a", "data": b"abc"}}),
            line({"audio": {"expires_at": 1}, "tool_calls": [call]}), *ends, DONE, sse_line(FAILED),
        )  # fmt: skip
        deltas = []
        with pytest.raises(ErrorLine) as failure:
            async for delta in read_deltas(lines, context):
                deltas.append(delta)
        assert failure.value.args == (FAILED,) and is_closed.is_set()
        assert [delta.text for delta in deltas] == ["é", "", "", "", ""]
        assert [delta.audio for delta in deltas] == [b"", b"abc", b"", b"", b""]
        assert deltas[2].tool_calls == [call] and deltas[3].finish_reason == "stop" and deltas[4].usage == usage
        assert all(delta.mm_token_counts == {"audio": 7} for delta in deltas)

    asyncio.run(main())
