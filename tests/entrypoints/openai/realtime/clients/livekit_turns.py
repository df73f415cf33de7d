# SPDX-License-Identifier: Apache-2.0
"""Turns with livekit's plugin for OpenAI, unmodified: `livekit_turns.py URL SLOW_URL TOOLS_URL MODEL SOUND`.

Prints them as JSON. The second server's first answer stops after its first piece, until it is cancelled; the third
server's model calls tools. The file is speech of a user: int16, 24 kHz, no header.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad

RATE = 24_000
SILENCE = bytes(2 * RATE)
VAD = ServerVad(type="server_vad", silence_duration_ms=400)
DIVE = {
    "name": "dive",
    "description": "Dives.",
    "parameters": {"type": "object", "properties": {"sea": {"type": "string"}}, "required": ["sea"]},
}


@llm.function_tool(raw_schema=DIVE)
async def dive(raw_arguments: dict[str, object]) -> str:
    raise AssertionError("the program makes the call itself, as an AgentSession does")


class Conversation:
    """A session."""

    def __init__(self, url: str, model: str, http: aiohttp.ClientSession, errors: list[str], vad: Any) -> None:
        self.realtime = RealtimeModel(
            base_url=f"{url}/v1", api_key="none", model=model, voice="alloy", http_session=http,
            turn_detection=vad, input_audio_transcription=None,
        )  # fmt: skip
        self.realtime.update_options(max_response_output_tokens=100)
        self.session = self.realtime.session()
        self.session.on("error", lambda error: errors.append(repr(error)))
        self.generations: asyncio.Queue[Any] = asyncio.Queue()
        self.session.on("generation_created", self.generations.put_nowait)

    def say(self, pcm: bytes) -> None:
        self.session.push_audio(rtc.AudioFrame(pcm, RATE, 1, len(pcm) // 2))


async def read(generation: Any) -> dict[str, Any]:
    """Text and seconds of speech of an answer."""
    text, seconds = "", 0.0
    async for message in generation.message_stream:
        async for part in message.text_stream:
            text += part
        async for frame in message.audio_stream:
            seconds += frame.duration
    return {"text": text, "seconds": seconds}


async def interrupt(made: Conversation, speech: bytes) -> dict[str, Any]:
    """A spoken question, and another one while the answer is played. What an AgentSession does then is done here."""
    session, speaks = made.session, asyncio.Event()
    cancelled: dict[str, bool] = {}  # by response; the connection has metrics without an id
    session.on("metrics_collected", lambda metrics: cancelled.update({metrics.request_id: metrics.cancelled}))
    session.on("input_speech_started", lambda _: speaks.set())
    made.say(SILENCE + speech + SILENCE)
    message = await anext(aiter((await made.generations.get()).message_stream))
    frame = await anext(aiter(message.audio_stream))
    speaks.clear()
    made.say(speech)
    await speaks.wait()
    session.interrupt()
    session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=int(1000 * frame.duration))
    rest = [frame.duration async for frame in message.audio_stream]
    made.say(SILENCE)
    answer = await read(await made.generations.get())
    await session.aclose()
    of_responses = [is_cancelled for response_id, is_cancelled in cancelled.items() if response_id]
    return {"heard": frame.duration + sum(rest), "answer": answer, "cancelled": of_responses}


async def call_tools(made: Conversation, speech: bytes) -> list[Any]:
    """The arguments of a call that answers a spoken question, and of another after its result."""
    session = made.session
    await session.update_tools([dive])
    made.say(SILENCE + speech + SILENCE)
    (first,) = [call async for call in (await made.generations.get()).function_stream]
    context = session.chat_ctx.copy()
    context.items.append(llm.FunctionCallOutput(call_id=first.call_id, output="It is warm.", is_error=False))
    await session.update_chat_ctx(context)
    (second,) = [call async for call in (await session.generate_reply()).function_stream]
    await session.aclose()
    return [[call.name, json.loads(call.arguments)] for call in (first, second)]


async def take_turns(made: Conversation) -> list[Any]:
    """A written and a spoken question, whose end the client knows."""
    session = made.session
    await session.update_instructions("Be kind.")
    context = llm.ChatContext()
    context.add_message(role="user", content="Why is the sea blue?")
    await session.update_chat_ctx(context)
    written = await read(await session.generate_reply())
    for _ in range(10):
        made.say(b"\x10\x00" * (RATE // 10))
    session.commit_audio()
    spoken = await read(await session.generate_reply())
    await session.aclose()
    return [written, spoken]


async def main(url: str, slow_url: str, tools_url: str, model: str, sound: str) -> None:
    errors: list[str] = []
    speech = Path(sound).read_bytes()
    async with aiohttp.ClientSession() as http:
        interrupted = await interrupt(Conversation(slow_url, model, http, errors, VAD), speech)
        calls = await call_tools(Conversation(tools_url, model, http, errors, VAD), speech)
        turns = await take_turns(Conversation(url, model, http, errors, None))
    print(json.dumps({"interrupted": interrupted, "calls": calls, "turns": turns, "errors": errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
