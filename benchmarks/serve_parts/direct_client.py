# SPDX-License-Identifier: Apache-2.0
"""The same requests, put to `AsyncOmniLLM` by a program that has the pipeline in its own process. Knows no HTTP."""

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

from serve_parts.loads import Answer, Load, Session, drive


def serve_loads(
    connection: Connection, model: str, llm_args: dict[str, Any], questions: list[dict[str, Any]], params: list[Any]
) -> None:
    """The process: says when its pipeline is ready, takes loads, gives sessions, until the other end is closed."""
    from vllm_omni import AsyncOmniLLM

    with AsyncOmniLLM(model, **llm_args) as llm:
        connection.send("ready")
        while True:
            try:
                load: Load = connection.recv()
            except EOFError:
                return
            connection.send(asyncio.run(_run(llm, load, questions, params)))


async def _run(llm: Any, load: Load, questions: list[dict[str, Any]], params: list[Any]) -> Session:
    modalities = ["text"] if load.endpoint == "text" else ["text", "audio"]

    async def call(number: int) -> tuple[Answer, list[Any]]:
        question = number % len(questions)
        return await _ask(llm, question, {**questions[question], "modalities": modalities}, params)

    cpu = time.process_time()
    seconds, answered = await drive(load, call)
    cpu = time.process_time() - cpu
    return Session(seconds, [_with_speech(*each, load.keeps_speech) for each in answered], cpu)


async def _ask(llm: Any, question: int, prompt: dict[str, Any], params: list[Any]) -> tuple[Answer, list[Any]]:
    from vllm_omni import ErrorEvent
    from vllm_omni.events import ARSegmentEvent

    answer, pieces, started = Answer(question), [], time.monotonic()
    async for event in llm.generate(prompt, params):
        when = time.monotonic() - started
        if isinstance(event, ErrorEvent):
            answer.error = str(event.error)
        elif isinstance(event, ARSegmentEvent):
            if event.final_output_type == "text":
                answer.first_text = answer.first_text or when
                answer.text += event.text
            elif "audio" in event.multimodal_output:
                answer.first_audio = answer.first_audio or when
                pieces.append(event.multimodal_output["audio"])
    answer.completed = time.monotonic() - started
    return answer, pieces


def _with_speech(answer: Answer, pieces: list[Any], keep: bool) -> Answer:
    """Converts the speech when the load is over: the server does it while it runs, which is part of what it costs."""
    from vllm_omni.entrypoints.openai.audio_formats import to_pcm16

    answer.hear(b"".join(to_pcm16(piece.numpy()).tobytes() for piece in pieces), keep)
    return answer
