# SPDX-License-Identifier: Apache-2.0
"""Turns that the server finds in the user's sound, and speech that interrupts a response."""

import asyncio
import base64
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tests.coloured_shapes.recordings import RECORDINGS, recording
from tests.entrypoints.openai.realtime.fake_chat import TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of, types_of
from tests.entrypoints.openai.realtime.test_responses import chat
from tests.entrypoints.wav_files import as_uri
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.realtime import turn_detection, turn_model
from vllm_omni.entrypoints.openai.realtime.turn_detection import IdleTimeout, TurnDetector, with_defaults
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni_talk.speech_recognition import resample

GROUP = "llm"
needs_vad = pytest.mark.skipif(
    importlib.util.find_spec("silero_vad") is None, reason="the extra realtime (silero-vad) is not installed"
)
VAD: Any = {"type": "server_vad", "silence_duration_ms": 400}
RATE = 24000
THREADS = ThreadPoolExecutor(1)


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
    detector = TurnDetector(with_defaults(VAD), RATE, 500, THREADS)

    async def main() -> list[Any]:
        return [turn for piece in pieces(samples, ms) for turn in await detector.feed(piece)]

    started, *pauses, stopped = asyncio.run(main())
    assert (started.kind, stopped.kind) == ("started", "stopped")
    assert {pause.kind for pause in pauses} == {"paused"}
    assert pauses[-1].at_ms == pytest.approx(stopped.at_ms - 200, abs=40)
    # 300 ms before the speech; 400 ms after it.
    assert started.at_ms == pytest.approx(500 + 1080 - 300, abs=150)
    assert stopped.at_ms == pytest.approx(500 + 1000 * len(samples) / RATE - 1080 + 400, abs=250)


@needs_vad
def test_speech_is_found_in_the_sound_of_a_telephone() -> None:
    samples = voiced()
    telephone = samples[: len(samples) // 3 * 3].reshape(-1, 3).mean(axis=1).astype("<i2")  # 8 kHz
    started, *_, stopped = asyncio.run(TurnDetector(with_defaults(VAD), RATE // 3, 0, THREADS).feed(telephone))
    assert started.at_ms == pytest.approx(1080 - 300, abs=150)
    assert stopped.at_ms == pytest.approx(1000 * len(samples) / RATE - 1080 + 400, abs=250)


@needs_vad
def test_speech_that_goes_on_ends_its_pause() -> None:
    speech, silence = recording("how many shapes are there"), np.zeros(RATE * 3 // 10, "<i2")
    samples = np.concatenate([speech, silence, speech, silence, silence])
    turns = asyncio.run(TurnDetector(with_defaults(VAD), RATE, 0, THREADS).feed(samples))
    pauses = [turn.at_ms for turn in turns if turn.kind == "paused"]
    assert turns[0].kind == "started" and [turn.kind for turn in turns[-2:]] == ["paused", "stopped"]
    assert [turn.kind for turn in turns[1:-1]] == ["paused", "resumed"] * (len(pauses) - 1) + ["paused"]
    resumed_ms = next(turn.at_ms for turn in turns if turn.kind == "resumed" and turn.at_ms > 1000 * len(speech) / RATE)
    assert resumed_ms == pytest.approx(1000 * (len(speech) + len(silence)) / RATE, abs=150)


class TurnModelOf:
    """In place of a `TurnModel`: its judgements in turn, and the lengths of what it has read."""

    def __init__(self, *judgements: bool) -> None:
        self._judgements = list(judgements)
        self.lengths: list[int] = []

    def is_complete(self, samples: np.ndarray) -> bool:
        self.lengths.append(len(samples))
        return self._judgements.pop(0)


def semantic_turns(samples: np.ndarray, eagerness: str = "high") -> list[Any]:
    settings = with_defaults({"type": "semantic_vad", "eagerness": eagerness})
    return asyncio.run(TurnDetector(settings, RATE, 0, THREADS).feed(samples))


@needs_vad
def test_a_turn_model_ends_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pause if it is complete, else after a longer silence. It reads the turn, with half a second before."""
    monkeypatch.setattr(turn_model, "find", lambda: Path("a network"))
    speech, silence = recording("what is in the picture"), np.zeros(RATE, "<i2")
    samples = np.concatenate([silence, speech, silence, speech, silence])
    model = TurnModelOf(True, True)
    monkeypatch.setattr(turn_model, "load", lambda: model)
    turns = semantic_turns(samples)
    assert [turn.kind for turn in turns] == ["started", "stopped"] * 2
    seconds = len(speech) / RATE
    assert turns[1].at_ms == pytest.approx(1000 * (1 + seconds) + 200, abs=150)
    assert [length / 16000 for length in model.lengths] == pytest.approx([0.5 + seconds + 0.2] * 2, abs=0.2)
    model = TurnModelOf(False, False)
    first, pause, resumed, last = semantic_turns(samples)
    assert [turn.kind for turn in (first, pause, resumed, last)] == ["started", "paused", "resumed", "paused"]
    assert not pause.may_end and not last.may_end
    model = TurnModelOf(False)
    turns = semantic_turns(np.concatenate([speech, np.tile(silence, 3)]))
    assert [turn.kind for turn in turns] == ["started", "paused", "stopped"]
    assert turns[2].at_ms - turns[1].at_ms == pytest.approx(2000 - 200, abs=40)


@needs_vad
def test_without_a_turn_model_turns_end_by_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_model, "find", lambda: None)
    turns = semantic_turns(np.concatenate([recording("what is in the picture"), np.zeros(RATE, "<i2")]))
    assert [turn.kind for turn in turns] == ["started", "paused", "stopped"] and turns[1].may_end
    assert turns[2].at_ms - turns[1].at_ms == pytest.approx(400 - 200, abs=40)


@pytest.mark.skipif(turn_model.find() is None, reason="the extra turn-model is not installed")
def test_the_installed_turn_model() -> None:
    """Questions to their ends, and the beginning of one."""
    model, silence = turn_model.load(), np.zeros(3200, np.float32)
    assert model is not None
    sounds = {name: resample(recording(name) / np.float32(32768), RATE, 16000) for name in RECORDINGS}
    ends = [model.is_complete(np.concatenate([sound, silence])) for sound in sounds.values()]
    assert sum(ends) >= 8
    begun = sounds["and where is it"]
    assert not model.is_complete(np.concatenate([begun[: len(begun) // 2], silence]))


@needs_vad
def test_silence_and_noise_are_no_speech() -> None:
    noise = (np.random.default_rng(0).normal(size=2 * RATE) * 500).astype("<i2")
    detector = TurnDetector(with_defaults(VAD), RATE, 0, THREADS)
    assert asyncio.run(detector.feed(noise)) == []


def test_a_detector_that_reads_minutes_leaves_the_threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the event loop, and its own between two seconds of sound."""
    goes_on = threading.Event()

    def blocked(detector: TurnDetector, window: np.ndarray) -> float:
        goes_on.wait()
        return 0.0

    monkeypatch.setattr(TurnDetector, "_probability", blocked)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        detectors = [TurnDetector(with_defaults(VAD), RATE, 0, THREADS) for _ in range(4)]
        feeds = [asyncio.create_task(each.feed(np.tile(SILENCE, 60))) for each in detectors]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 60) == "free"
        other = asyncio.wrap_future(THREADS.submit(lambda: sum(each.done() for each in feeds)))
        await asyncio.sleep(0)
        goes_on.set()
        assert await other == 0
        assert await asyncio.gather(*feeds) == [[]] * 4

    asyncio.run(main())


async def send(session: Session, samples: np.ndarray) -> None:
    for piece in pieces(samples):
        await session.connection.input_audio_buffer.append(audio=base64.b64encode(piece.tobytes()).decode())


@needs_vad
def test_a_turn_is_committed_and_answered(realtime_app: FastAPI) -> None:
    """As a chat about its sound up to the last pause is; nothing cuts the speech of the answer."""
    samples = voiced()

    async def main(session: Session) -> tuple[list[Any], Any]:
        assert session.events[0].session.audio.input.turn_detection.type == "server_vad"
        await session.configure(audio={"input": {"turn_detection": VAD}}, max_output_tokens=100)
        await send(session, samples)
        events = await session.until("response.done")
        return events, await session.retrieve(events[0].item_id)

    events, item = converse(realtime_app, main, manual=False)
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
    said = np.frombuffer(base64.b64decode(item.content[0].audio), "<i2")
    first = started.audio_start_ms * RATE // 1000
    np.testing.assert_array_equal(said, samples[first : first + len(said)])
    assert (first + len(said)) * 1000 // RATE == pytest.approx(stopped.audio_end_ms, abs=1)
    end = (stopped.audio_end_ms - 192) * RATE // 1000  # Windows of 32 ms: 224 ms are a pause, 416 an end.
    uri = as_uri(encode_audio(samples[first:end].astype(np.float32) / 32768, "wav", RATE))
    message = {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": uri}}]}
    audio = {"format": "pcm16", "voice": "default"}
    expected = chat(realtime_app, [message], modalities=["text", "audio"], audio=audio, max_completion_tokens=100)
    heard = expected.choices[0].message.audio
    assert events[-1].response.output[0].content[0].transcript == heard.transcript != ""
    assert len(speech_of(events)) == len(base64.b64decode(heard.data)) > 0


@needs_vad
def test_speech_interrupts_a_response() -> None:
    """The response is still being sent when the user speaks again: a minute of speech, as it is played."""
    fake = FakeChat(hears=True)
    fake.answer = lambda messages: [ChatDelta(text="ha " * 600), *[ChatDelta(speech=TONE)] * 600]

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"turn_detection": VAD}})
        await send(session, voiced())
        await session.until("response.output_audio.delta")
        fake.answer = lambda messages: [ChatDelta(text="Yes?"), ChatDelta(speech=TONE)]
        await send(session, voiced())
        events = await session.until("response.done")
        response = events[-1].response
        assert "input_audio_buffer.speech_started" in types_of(events)
        assert response.status == "cancelled" and response.status_details.reason == "turn_detected"
        (item,) = response.output
        text = item.content[0].transcript
        end = 100
        await session.truncate(item.id, end)
        heard = (await session.retrieve(item.id)).content[0].transcript
        assert text.startswith(heard) and len(heard) < len(text)
        # The turn that interrupted it is answered, maybe before the item was shown.
        while len(done := [event for event in session.events if event.type == "response.done"]) < 2:
            await session.next()
        assert done[1].response.status == "completed"

    converse(session_app(fake, realtime_lead_s=0.1), main, model="fake", manual=False)


IDLE: Any = {**VAD, "idle_timeout_ms": 1000}
SILENCE = np.zeros(RATE, "<i2")


def test_silence_is_measured_once_the_answer_was_played() -> None:
    async def main() -> None:
        idle, now = IdleTimeout(), asyncio.get_running_loop().time()
        assert not idle.feed(0, 9000, 1000) and idle.start_ms is None  # There was no answer.
        idle.start(now + 3600)
        assert not idle.feed(9000, 18000, 1000) and idle.start_ms is None  # It is still played.
        idle.start(now)
        assert not idle.feed(18000, 18600, None) and idle.start_ms is None
        assert not idle.feed(18000, 18600, 1000) and idle.start_ms == 18000
        assert idle.feed(18600, 19000, 1000)
        idle.restart()
        assert not idle.feed(19000, 19900, 1000) and idle.start_ms == 19000
        idle.stop()
        assert not idle.feed(19900, 29000, 1000) and idle.start_ms is None

    asyncio.run(main())


@needs_vad
def test_a_user_who_stays_silent_is_asked(realtime_app: FastAPI) -> None:
    """A second of silence after each answer, not before the first one; the model reads it as the user's turn."""

    async def main(session: Session) -> tuple[list[Any], list[Any], Any]:
        await session.configure(audio={"input": {"turn_detection": IDLE}}, output_modalities=["text"])
        await send(session, np.tile(SILENCE, 2))
        await session.say("Why is the sea blue?")
        await session.respond()
        before = len(session.events)
        await send(session, SILENCE)
        first = await session.until("response.done")
        item = await session.retrieve(first[0].item_id)
        assert session.events[before].type == "input_audio_buffer.timeout_triggered"
        await send(session, SILENCE)
        return first, await session.until("response.done"), item

    first, second, item = converse(realtime_app, main, manual=False)
    for events, start_ms in ((first, 2000), (second, 3000)):
        assert types_of(events)[:5] == [
            "input_audio_buffer.timeout_triggered",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        triggered, committed, added = events[:3]
        assert (triggered.audio_start_ms, triggered.audio_end_ms) == (start_ms, start_ms + 1000)
        assert triggered.item_id == committed.item_id == added.item.id
        assert events[-1].response.output[0].content[0].text
    assert item.role == "user" and base64.b64decode(item.content[0].audio) == SILENCE.tobytes()


@pytest.mark.slow
@needs_vad
def test_speech_ends_the_silence(realtime_app: FastAPI) -> None:
    """A user who speaks in time has a usual turn, and without `idle_timeout_ms` silence is no turn."""

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"turn_detection": IDLE}}, output_modalities=["text"])
        await session.say("Why is the sea blue?")
        await session.respond()
        await send(session, np.concatenate([SILENCE[: RATE // 2], voiced()[RATE:]]))
        types = types_of(await session.until("response.done"))
        assert types[:2] == ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
        assert "input_audio_buffer.timeout_triggered" not in types_of(session.events)
        await session.configure(audio={"input": {"turn_detection": VAD}})
        await send(session, np.tile(SILENCE, 2))
        await session.say("And now?")  # All the silence was read before.
        assert "input_audio_buffer.timeout_triggered" not in types_of(session.events)

    converse(realtime_app, main, manual=False)


def test_without_silero_vad(realtime_app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_detection, "is_installed", lambda: False)

    async def main(session: Session) -> None:
        assert session.events[0].session.audio.input.turn_detection is None
        await session.connection.session.update(
            session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        )
        error = await session.error()
        assert error.param == "session.audio.input.turn_detection" and "pip install 'silero-vad" in error.message

    converse(realtime_app, main, manual=False)
