# SPDX-License-Identifier: Apache-2.0
"""Turns that the server finds in the user's sound, and speech that interrupts a response."""

import asyncio
import base64
import importlib.util
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tests.coloured_shapes.recordings import recording
from tests.entrypoints.openai.realtime.sessions import Session, converse, types_of
from vllm_omni.entrypoints.openai.realtime import turn_detection
from vllm_omni.entrypoints.openai.realtime.output_items import SpokenMessage
from vllm_omni.entrypoints.openai.realtime.turn_detection import TurnDetector, with_defaults

GROUP = "app"
needs_vad = pytest.mark.skipif(
    importlib.util.find_spec("silero_vad") is None, reason="the extra realtime (silero-vad) is not installed"
)
VAD: Any = {"type": "server_vad", "silence_duration_ms": 400}
RATE = 24000


def voiced() -> np.ndarray:
    """A second of silence, speech, and a second of silence: int16 `[samples]` at 24 kHz."""
    silence = np.zeros(RATE, "<i2")
    return np.concatenate([silence, recording("how many shapes are there"), silence])


def pieces(samples: np.ndarray, ms: int = 100) -> list[np.ndarray]:
    step = RATE * ms // 1000
    return [samples[start : start + step] for start in range(0, len(samples), step)]


@needs_vad
@pytest.mark.parametrize("ms", [20, 100, 4000])
def test_speech_is_found_in_any_pieces(ms: int) -> None:
    samples = voiced()
    detector = TurnDetector(with_defaults(VAD), RATE, 500)

    async def main() -> list[Any]:
        return [turn for piece in pieces(samples, ms) for turn in await detector.feed(piece)]

    started, stopped = asyncio.run(main())
    assert (started.kind, stopped.kind) == ("started", "stopped")
    # 300 ms before the speech; 400 ms after it.
    assert started.at_ms == pytest.approx(500 + 1080 - 300, abs=150)
    assert stopped.at_ms == pytest.approx(500 + 1000 * len(samples) / RATE - 1080 + 400, abs=250)


@needs_vad
def test_silence_and_noise_are_no_speech() -> None:
    noise = (np.random.default_rng(0).normal(size=2 * RATE) * 500).astype("<i2")
    detector = TurnDetector(with_defaults(VAD), RATE, 0)
    assert asyncio.run(detector.feed(noise)) == []


async def send(session: Session, samples: np.ndarray) -> None:
    for piece in pieces(samples):
        await session.connection.input_audio_buffer.append(audio=base64.b64encode(piece.tobytes()).decode())


@needs_vad
def test_a_turn_is_committed_and_answered(realtime_app: FastAPI) -> None:
    samples = voiced()

    async def main(session: Session) -> list[Any]:
        assert session.events[0].session.audio.input.turn_detection.type == "server_vad"
        await session.configure(audio={"input": {"turn_detection": VAD}}, output_modalities=["text"])
        await send(session, samples)
        events = await session.until("response.done")
        await session.connection.conversation.item.retrieve(item_id=events[0].item_id)
        return events + await session.until("conversation.item.retrieved")

    events = converse(realtime_app, main, manual=False)
    assert types_of(events)[:6] == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]
    started, stopped = events[:2]
    assert {event.item_id for event in events[:3]} == {started.item_id} and events[3].item.id == started.item_id
    said = np.frombuffer(base64.b64decode(events[-1].item.content[0].audio), "<i2")
    first = started.audio_start_ms * RATE // 1000
    np.testing.assert_array_equal(said, samples[first : first + len(said)])
    assert (first + len(said)) * 1000 // RATE == pytest.approx(stopped.audio_end_ms, abs=1)
    assert events[-2].response.output[0].content[0].text


@pytest.mark.slow
@needs_vad
def test_speech_interrupts_a_response(realtime_app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is still being sent when the user speaks again: its client has the first piece, and plays slowly."""
    first: list[SpokenMessage] = []

    async def wait(message: SpokenMessage, seconds: float) -> None:
        if message in first:
            await asyncio.Event().wait()
        if not first:
            first.append(message)

    monkeypatch.setattr(SpokenMessage, "_wait", wait)

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"turn_detection": VAD}})
        await send(session, voiced())
        events = await session.until("response.output_audio.delta")
        await send(session, voiced())
        events = await session.until("response.done")
        response = events[-1].response
        assert "input_audio_buffer.speech_started" in types_of(events)
        assert response.status == "cancelled" and response.status_details.reason == "turn_detected"
        (item,) = response.output
        text = item.content[0].transcript
        end = 100
        await session.connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=end)
        await session.until("conversation.item.truncated")
        await session.connection.conversation.item.retrieve(item_id=item.id)
        heard = (await session.until("conversation.item.retrieved"))[-1].item.content[0].transcript
        assert text.startswith(heard) and len(heard) < len(text)
        # The turn that interrupted it is answered.
        assert (await session.until("response.done"))[-1].response.status != "cancelled"

    converse(realtime_app, main, manual=False)


@pytest.mark.slow
@needs_vad
def test_turns_without_responses(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> None:
        vad = {**VAD, "create_response": False}
        await session.configure(audio={"input": {"turn_detection": vad}})
        await send(session, voiced())
        await session.until("conversation.item.done")
        # A detector of another session starts anew.
        await session.configure(audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}})
        await session.connection.input_audio_buffer.clear()
        await session.until("input_audio_buffer.cleared")
        assert all(event.type != "response.created" for event in session.events)

    converse(realtime_app, main)


def test_without_silero_vad(realtime_app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_detection, "is_installed", lambda: False)

    async def main(session: Session) -> None:
        assert session.events[0].session.audio.input.turn_detection is None
        await session.connection.session.update(
            session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        )
        error = await session.error()
        assert error.param == "session.audio.input.turn_detection" and "vllm-omni[realtime]" in error.message

    converse(realtime_app, main, manual=False)
