# SPDX-License-Identifier: Apache-2.0
"""Two turns with pipecat's service for OpenAI, unmodified: `pipecat_turns.py URL MODEL`; prints them as JSON."""

import asyncio
import json
import sys
from typing import Any

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
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


class Player(FrameProcessor):
    """Keeps what it gets of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.errors: list[str] = []
        self._text, self._num_bytes = "", 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._num_bytes += len(frame.audio)
        elif isinstance(frame, TTSTextFrame):
            self._text += frame.text
        elif isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.ended.put_nowait({"text": self._text, "seconds": self._num_bytes / 2 / RATE})
            self._text, self._num_bytes = "", 0
        await self.push_frame(frame, direction)


async def main(url: str, model: str) -> None:
    settings = events.SessionProperties(
        instructions="Be kind.",
        audio=events.AudioConfiguration(
            input=events.AudioInput(turn_detection=False), output=events.AudioOutput(voice="alloy")
        ),
    )
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws") + "/v1/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model=model, session_properties=settings),
    )
    player = Player()
    task = PipelineTask(Pipeline([service, player]))
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    context = LLMContext([{"role": "user", "content": "Why is the sea blue?"}])
    await task.queue_frame(LLMContextFrame(context))
    written = await asyncio.wait_for(player.ended.get(), 60)
    for _ in range(10):
        await task.queue_frame(InputAudioRawFrame(b"\x10\x00" * (RATE // 10), RATE, 1))
    await task.queue_frame(UserStoppedSpeakingFrame())
    spoken = await asyncio.wait_for(player.ended.get(), 60)
    await task.cancel()
    await running
    print(json.dumps({"turns": [written, spoken], "errors": player.errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
