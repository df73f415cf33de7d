# SPDX-License-Identifier: Apache-2.0
"""How many files of this package a streamed spoken chat, and a realtime turn, pass in the server's process."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import openai
from fastapi import FastAPI

import vllm_omni
from tests.entrypoints.openai.media_apps import MODEL, use
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of
from vllm_omni import AsyncOmniLLM
from vllm_omni.launch.supervisor import SilenceWatch
from vllm_omni.metrics.observer import CompositeObserver
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.testing.media import make_audio

GROUP = "llm"
PACKAGE = f"{Path(vllm_omni.__file__).parent}/"
PASSED = {"entrypoints/openai/middleware.py", "entrypoints/openai/streamed_chat.py", "orchestrator/router.py"}
"""By both, on the event loop and on the orchestrator's thread: the count has not missed one of these threads."""
MAX_CHAT, MAX_REALTIME = 47, 60
TIMED = {
    Orchestrator._on_stats.__code__,
    CompositeObserver.engine_metrics.__code__,
    SilenceWatch.on_timer.__code__,
}
"""What the pipeline does at times of its own, whatever requests do: the files that only this passes do not count."""
SOUND = (make_audio(0, 0.7) * 32767).astype("<i2")


def is_timed(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in TIMED:
        frame = frame.f_back
    return frame is not None


@contextmanager
def noted(llm: AsyncOmniLLM) -> Iterator[set[str]]:
    """The files whose functions are called in this thread, in those of the pipeline, and in those that start here."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not is_timed(frame):
            files.add(name.removeprefix(PACKAGE))

    def profile(function: Any) -> None:
        is_set = threading.Event()

        def on_thread() -> None:
            sys.setprofile(function)
            is_set.set()

        llm._pipeline.orchestrator._command(on_thread)
        llm._preprocessing.submit(sys.setprofile, function).result()
        threading.setprofile(function)
        sys.setprofile(function)
        assert is_set.wait(60)

    profile(note)
    try:
        yield files
    finally:
        profile(None)


def test_a_streamed_spoken_chat(realtime_app: FastAPI, realtime_llm: AsyncOmniLLM) -> None:
    async def main(client: openai.AsyncOpenAI) -> int:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Why is the sea blue?"}],
            stream=True,
            modalities=["text", "audio"],
            audio={"format": "pcm16", "voice": "default"},
        )
        audio = [chunk.choices[0].delta.audio async for chunk in stream if chunk.choices]
        return sum(len(part.data or "") for part in audio if part is not None)

    use(realtime_app, main)  # What is only done once is not counted.
    with noted(realtime_llm) as files:
        assert use(realtime_app, main) > 10_000
    assert files > PASSED
    assert len(files) <= MAX_CHAT, "\n".join(sorted(files))


def test_a_realtime_turn(realtime_app: FastAPI, realtime_llm: AsyncOmniLLM) -> None:
    async def main(session: Session) -> set[str]:
        for _ in range(2):
            files.clear()
            await session.speak(SOUND)
            assert speech_of(await session.respond())
        return set(files)

    with noted(realtime_llm) as files:
        passed = converse(realtime_app, main)
    assert passed > PASSED | {"entrypoints/openai/realtime/audio.py"}
    assert len(passed) <= MAX_REALTIME, "\n".join(sorted(passed))
