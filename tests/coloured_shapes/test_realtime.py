# SPDX-License-Identifier: Apache-2.0
"""A spoken conversation with the shipped model over `/v1/realtime`, in real time, judged by a recognizer.

`-s` prints what was said, and the times from the end of a question to the first sound of its answer.
"""

import asyncio
import base64
import importlib.util
import io
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from coloured_shapes.language import random_scene, split_words
from coloured_shapes.pictures import RGB, draw
from coloured_shapes.recognizer import Recognizer
from coloured_shapes.speech import SAMPLE_RATE
from tests.coloured_shapes.recordings import recording
from tests.entrypoints.conftest import as_async
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import app_of, with_flags
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of
from tests.examples.running import run_example
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni_talk.speech_recognition import count_understood

GROUP = "shapes"
pytestmark = pytest.mark.slow

QUESTIONS = ("what is in the picture", "how many shapes are there", "what colour is the circle", "where is the star")
PIECE_S = 0.1


@pytest.fixture(scope="module")
def app(shapes_llm: OmniLLM) -> FastAPI:
    return app_of(OmniEngineClient(as_async(shapes_llm)), Path("shapes"))


async def say(session: Session, samples: np.ndarray, is_recorded: bool = False) -> None:
    """As a microphone does: a piece when its time has come; what has been recorded is sent at once."""
    step = int(PIECE_S * SAMPLE_RATE)
    for start in range(0, len(samples), step):
        piece = samples[start : start + step].tobytes()
        await session.connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        await asyncio.sleep(0 if is_recorded else PIECE_S)


async def answer(session: Session, ended: float) -> tuple[float, Any, np.ndarray]:
    """Seconds to the first sound, the response, and its speech."""
    events = await session.until("response.output_audio.delta")
    first = time.perf_counter() - ended
    events += await session.until("response.done")
    return first, events[-1].response, np.frombuffer(speech_of(events), "<i2").astype(np.float32) / 32768


async def show_picture(session: Session) -> None:
    file = io.BytesIO()
    rng = random.Random(0)
    draw(rng, random_scene(rng)).save(file, "PNG")
    image = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    await session.add({"type": "input_image", "image_url": image})


def skip_without_vad(detects: bool) -> None:
    if detects and importlib.util.find_spec("silero_vad") is None:
        pytest.skip("the extra realtime (silero-vad) is not installed")


WAYS = pytest.mark.parametrize("detects", [False, True], ids=["committed by the client", "server_vad"])


@WAYS
def test_a_conversation(app: FastAPI, detects: bool) -> None:
    skip_without_vad(detects)
    silence = np.zeros(SAMPLE_RATE, "<i2")

    async def main(session: Session) -> list[tuple[str, float, str, np.ndarray]]:
        vad = {"type": "server_vad"} if detects else None
        await session.configure(audio={"input": {"turn_detection": vad}})
        await show_picture(session)
        turns = []
        for question in QUESTIONS:
            await say(session, recording(question), is_recorded=not detects)
            ended = time.perf_counter()
            if detects:
                rest = asyncio.create_task(say(session, silence))
            else:
                await session.connection.input_audio_buffer.commit()
                await session.connection.response.create()
            first, response, speech = await answer(session, ended)
            if detects:
                await rest
            assert response.status == "completed", response
            turns.append((question, first, response.output[0].content[0].transcript, speech))
        return turns

    turns = converse(app, main, manual=False)
    recognizer = Recognizer()
    understood = num_words = 0
    for question, first, text, speech in turns:
        heard = recognizer.words(speech, SAMPLE_RATE)
        print(f"{question}? -> {text} ({1000 * first:.0f} ms; heard: {' '.join(heard)})")
        understood += count_understood(split_words(text), heard)
        num_words += len(split_words(text))
    assert understood / num_words >= 0.75
    assert len({text for _, _, text, _ in turns}) >= 3


def test_answers_begun_at_the_pause(app: FastAPI) -> None:
    """What the user gets is what it gets without; a question that goes on after a pause costs its first answer."""
    skip_without_vad(True)
    silence = np.zeros(SAMPLE_RATE, "<i2")
    first, *others = [recording(question) for question in QUESTIONS]
    questions = [np.concatenate([first, silence[: SAMPLE_RATE * 35 // 100], others[0]]), *others]

    async def main(session: Session) -> list[tuple[float, list[str], str, bytes]]:
        await show_picture(session)
        turns = []
        for samples in questions:
            await say(session, samples)
            ended, num_before = time.perf_counter(), len(session.events)
            rest = asyncio.create_task(say(session, silence))
            seconds, response, speech = await answer(session, ended)
            await rest
            types = list(dict.fromkeys(event.type for event in session.events[num_before:]))
            turns.append((seconds, types, response.output[0].content[0].transcript, speech.tobytes()))
        return turns

    begun, waiting = app, with_flags(app, "--max-realtime-speculative-responses=0")
    counts = {name: each.state.omni_realtime.speculations.counts for name, each in (("", begun), ("0", waiting))}
    before = counts[""].started, counts[""].promoted
    with_it, without = (converse(each, main, manual=False) for each in (begun, waiting))
    for (seconds, types, text, speech), (waited, types_without, text_without, speech_without) in zip(
        with_it, without, strict=True
    ):
        print(f"{text} ({1000 * seconds:.0f} ms, without {1000 * waited:.0f} ms)")
        assert types == types_without and text == text_without
        np.testing.assert_allclose(*(np.frombuffer(each, np.float32) for each in (speech, speech_without)), atol=1e-3)
    started, promoted = counts[""].started - before[0], counts[""].promoted - before[1]
    assert promoted == len(questions) and started > promoted and counts["0"].started == 0


@WAYS
def test_five_turns_with_a_barge_in_and_a_tool(app: FastAPI, capsys: pytest.CaptureFixture[str], detects: bool) -> None:
    skip_without_vad(detects)
    flags = ("--realtime-lead-s=0.5", "--enable-auto-tool-choice", "--tool-call-parser=pythonic")
    with over_http(with_flags(app, *flags)) as url:
        run_example("online/spoken_conversation.py", f"--base-url={url}/v1", *([] if detects else ["--no-vad"]))
    said = capsys.readouterr().out
    print(said)
    assert said.count("user: ") == said.count("model: ") == 5
    assert "(interrupts after" in said and "(the answer before is cancelled" in said
    call = re.search(r'tool:  highlight\({"colour":"(.*)"}\) -> highlighted (.*)', said)
    assert call is not None and call[1] == call[2] and call[1] in RGB
    remembered = re.search(r"the model remembers: '(.*)'", said)
    assert remembered is not None
    first, *_, last = re.findall(r"model: (.*) \(", said)
    assert first.startswith(remembered[1]) and first != remembered[1] and last
