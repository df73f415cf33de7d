# SPDX-License-Identifier: Apache-2.0
"""Two turns with livekit's plugin for OpenAI, unmodified: `livekit_turns.py URL MODEL`; prints them as JSON."""

import asyncio
import json
import sys
from typing import Any

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

RATE = 24_000


async def read(generation: Any) -> dict[str, Any]:
    """Text and seconds of speech of an answer."""
    text, seconds = "", 0.0
    async for message in generation.message_stream:
        async for part in message.text_stream:
            text += part
        async for frame in message.audio_stream:
            seconds += frame.duration
    return {"text": text, "seconds": seconds}


async def main(url: str, model: str) -> None:
    errors: list[str] = []
    async with aiohttp.ClientSession() as http:
        realtime = RealtimeModel(
            base_url=f"{url}/v1", api_key="none", model=model, voice="alloy", http_session=http,
            turn_detection=None, input_audio_transcription=None,
        )  # fmt: skip
        session = realtime.session()
        session.on("error", lambda error: errors.append(repr(error)))
        await session.update_instructions("Be kind.")
        context = llm.ChatContext()
        context.add_message(role="user", content="Why is the sea blue?")
        await session.update_chat_ctx(context)
        written = await read(await session.generate_reply())
        for _ in range(10):
            session.push_audio(rtc.AudioFrame(b"\x10\x00" * (RATE // 10), RATE, 1, RATE // 10))
        session.commit_audio()
        spoken = await read(await session.generate_reply())
        await session.aclose()
    print(json.dumps({"turns": [written, spoken], "errors": errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
