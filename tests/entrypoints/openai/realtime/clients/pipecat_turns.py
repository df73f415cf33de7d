# SPDX-License-Identifier: Apache-2.0
"""Turns with pipecat's service for OpenAI, unmodified: `pipecat_turns.py URL SLOW_URL TOOLS_URL MODEL SOUND`.

Prints them as JSON. The second server's first answer stops after its first piece, until it is cancelled; the third
server's model calls tools. The file is speech of a user: int16, 24 kHz, no header.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    FunctionCallResultFrame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

RATE = 24_000
SILENCE = bytes(2 * RATE)
VAD = events.TurnDetection(silence_duration_ms=400)
DIVE = FunctionSchema("dive", "Dives.", {"sea": {"type": "string"}}, ["sea"])


class Player(FrameProcessor):
    """Keeps what it gets of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.speaks, self.has_result = asyncio.Event(), asyncio.Event()
        self.errors: list[str] = []
        self._text, self._num_bytes = "", 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._num_bytes += len(frame.audio)
            self.speaks.set()
        elif isinstance(frame, TTSTextFrame):
            self._text += frame.text
        elif isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
        elif isinstance(frame, FunctionCallResultFrame):
            self.has_result.set()
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.ended.put_nowait({"text": self._text, "seconds": self._num_bytes / 2 / RATE})
            self._text, self._num_bytes = "", 0
        await self.push_frame(frame, direction)


class Conversation:
    """A session."""

    def __init__(self, service: OpenAIRealtimeLLMService) -> None:
        self.player = Player()
        self.task = PipelineTask(Pipeline([service, self.player]))

    async def ask(self) -> None:
        """Asks a written question."""
        await self.task.queue_frame(LLMContextFrame(LLMContext([{"role": "user", "content": "Why is the sea blue?"}])))

    async def say(self, pcm: bytes) -> None:
        for start in range(0, len(pcm), RATE // 5):
            await self.task.queue_frame(InputAudioRawFrame(pcm[start : start + RATE // 5], RATE, 1))

    async def answer(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.player.ended.get(), 60)


@asynccontextmanager
async def opened(url: str, model: str, errors: list[str], vad: Any, **functions: Any) -> AsyncIterator[Conversation]:
    settings = events.SessionProperties(
        instructions="Be kind.",
        max_output_tokens=100,
        tools=[DIVE] if functions else None,
        audio=events.AudioConfiguration(
            input=events.AudioInput(turn_detection=vad), output=events.AudioOutput(voice="alloy")
        ),
    )
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws") + "/v1/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model=model, session_properties=settings),
    )
    for name, function in functions.items():
        service.register_function(name, function)
    made = Conversation(service)
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(made.task))
    yield made
    await made.task.cancel()
    await running
    errors += made.player.errors


async def interrupt(made: Conversation, speech: bytes) -> dict[str, Any]:
    """A question, and another one while its answer is played: the service reports what was heard."""
    await made.ask()
    await asyncio.wait_for(made.player.speaks.wait(), 60)
    await made.say(speech)
    heard = (await made.answer())["seconds"]
    await made.say(SILENCE)
    return {"heard": heard, "answer": await made.answer()}


async def call_tools(url: str, model: str, errors: list[str], speech: bytes) -> list[Any]:
    """The arguments of a call that answers a written question, and of another that answers a spoken one after it."""
    calls: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def dive(params: Any) -> None:
        calls.put_nowait([params.function_name, params.arguments])
        await params.result_callback({"water": "warm"})

    async with opened(url, model, errors, VAD, dive=dive) as made:
        await made.ask()
        first = await asyncio.wait_for(calls.get(), 60)
        await made.player.has_result.wait()
        await made.say(SILENCE + speech + SILENCE)
        return [first, await asyncio.wait_for(calls.get(), 60)]


async def take_turns(made: Conversation) -> list[Any]:
    """A written and a spoken question, whose end the client knows."""
    await made.ask()
    written = await made.answer()
    await made.say(b"\x10\x00" * RATE)
    await made.task.queue_frame(UserStoppedSpeakingFrame())
    return [written, await made.answer()]


async def main(url: str, slow_url: str, tools_url: str, model: str, sound: str) -> None:
    errors: list[str] = []
    speech = Path(sound).read_bytes()
    async with opened(slow_url, model, errors, VAD) as made:
        interrupted = await interrupt(made, speech)
    calls = await call_tools(tools_url, model, errors, speech)
    async with opened(url, model, errors, False) as made:
        turns = await take_turns(made)
    print(json.dumps({"interrupted": interrupted, "calls": calls, "turns": turns, "errors": errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
