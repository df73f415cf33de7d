# SPDX-License-Identifier: Apache-2.0
"""Texts in pieces over a WebSocket, each spoken while it is being written."""

import asyncio
import io
import json
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import websockets
from fastapi import FastAPI

from tests.entrypoints.fake_pipelines import is_idle, running
from tests.entrypoints.openai.fake_server import FakeServer, over_http
from tests.entrypoints.openai.speech_sessions import Stream, opened, sound_of, stream
from tests.entrypoints.spoken_functions import NUM_SAMPLES, RATE, SPEAKING, WRITING_STAGE
from tests.fuzz.fuzz_sessions import bad_message
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai import speech_stream
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.http_protocol import web_socket_protocol
from vllm_omni.entrypoints.openai.request_context import SCOPE_KEY, RequestContext
from vllm_omni.entrypoints.openai.speech import SpeechUsage
from vllm_omni.errors import InvalidRequestError, PipelineFullError

SENTENCES = ["It is a day of rain in the north. ", "Nobody goes out! ", "Why should they?"]
TEXT = "".join(SENTENCES)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [WRITING_STAGE, SPEAKING]) as llm:
        yield llm


@pytest.fixture(scope="module")
def app(llm: AsyncOmniLLM) -> FastAPI:
    return FakeServer(llm).app


def pieces_of(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("pieces", [[TEXT], pieces_of(TEXT), list(TEXT)], ids=["whole", "pieces", "letters"])
def test_an_utterance_is_its_sentences(app: FastAPI, pieces: list[str]) -> None:
    async def main(session: Stream) -> None:
        events = await session.say(*pieces)
        done = events[-1]
        assert done["status"] == "completed" and done["finish_reason"] == "stop" and "usage" in done
        assert len({event["item_id"] for event in events if "item_id" in event}) == 1
        assert sound_of(events) == b"".join([await session.speak(sentence) for sentence in SENTENCES])
        times = [event["sentence_timestamps"] for event in events if event["type"] == "timestamps"]
        assert [sentence for each in times for sentence in each["sentences"]] == SENTENCES
        starts, ends = ([time for each in times for time in each[name]] for name in ("start", "end"))
        assert starts == [0.0, *ends[:-1]]
        lengths = np.diff([0.0, *ends]) * RATE / NUM_SAMPLES
        np.testing.assert_allclose(lengths, [len(sentence) for sentence in SENTENCES])

    stream(app, main)


def test_speech_begins_before_the_text_has_ended(app: FastAPI) -> None:
    async def main(session: Stream) -> None:
        await session.append("One sentence. A")
        events = await session.until("timestamps")
        assert sound_of(events) == await session.speak("One sentence. ")
        await session.append("nother one.")
        await session.send("input_text_buffer.commit")
        assert sound_of(await session.until("speech.audio.done")) == await session.speak("Another one.")

    stream(app, main)


def test_utterances_in_turn(app: FastAPI) -> None:
    """Each with the settings at its beginning; the second waits for the first."""

    async def main(session: Stream) -> None:
        assert (await session.configure(voice="bob", speed=2))["voice"] == "bob"
        await session.append("First one.")
        await session.send("input_text_buffer.commit")
        configured = await session.configure(speed=1)
        assert configured["voice"] == "bob" and configured["response_format"] == "pcm"
        await session.append("Second one.")
        await session.send("input_text_buffer.commit")
        while [event["type"] for event in session.events].count("speech.audio.done") < 2:
            await session.next()
        ids = [event["item_id"] for event in session.events if event["type"] == "input_text_buffer.committed"]
        for item_id, text, speed in zip(ids, ("First one.", "Second one."), (2, 1), strict=True):
            own = [event for event in session.events if event.get("item_id") == item_id]
            assert sound_of(own) == await session.speak(text, voice="bob", speed=speed)
        kinds = [event.get("item_id") for event in session.events if event["type"].startswith("speech.audio")]
        assert kinds == sorted(kinds, key=ids.index)

    stream(app, main)


@pytest.mark.parametrize("file_format", ["wav", "flac", "mp3"])
def test_an_utterance_is_one_file(app: FastAPI, file_format: str) -> None:
    async def main(session: Stream) -> None:
        await session.configure(response_format=file_format, speed=2)
        for _ in range(2):
            data = sound_of(await session.say(TEXT))
            samples, rate = soundfile.read(io.BytesIO(data)) if file_format != "flac" else (None, RATE)
            assert rate == RATE and (samples is None or abs(len(samples) - len(TEXT) * NUM_SAMPLES / 2) < 4000)

    stream(app, main)


def test_what_has_not_been_sent_is_cancelled(app: FastAPI, llm: AsyncOmniLLM) -> None:
    async def main(session: Stream) -> None:
        for _ in range(3):
            await session.append("A sentence of some length. " * 200)
            await session.send("input_text_buffer.commit")
        await session.until("speech.audio.delta")
        await session.append("Not complete")
        await session.send("input_text_buffer.clear")
        await session.until("input_text_buffer.cleared")
        done = [event for event in session.events if event["type"] == "speech.audio.done"]
        assert [event["status"] for event in done] == ["cancelled"] * 4 and len({each["item_id"] for each in done}) == 4
        assert sound_of(await session.say("Go on.")) == await session.speak("Go on.")
        await session.append("A sentence of some length. " * 200)
        await session.until("speech.audio.delta")

    stream(app, main)
    for _ in range(6000):
        if is_idle(llm):
            return
        asyncio.run(asyncio.sleep(0.01))
    raise AssertionError("a request runs on, whose client has left")


def test_errors_leave_the_session(app: FastAPI) -> None:
    async def main(session: Stream) -> None:
        for event, param in (
            ({"type": "input_text_buffer.appendix"}, "type"),
            ({"type": "input_text_buffer.append"}, "text"),
            ({"type": "input_text_buffer.append", "text": 3}, "text"),
            ({"type": "input_text_buffer.append", "text": "a", "colour": "red"}, "colour"),
            ({"type": "session.update", "session": {"voice": "eve"}}, "session.voice"),
            ({"type": "session.update", "session": {"speed": 9}}, "session.speed"),
            ({"type": "session.update", "session": {"tone": 1}}, "session.tone"),
            ({"type": "session.update", "session": {"language": "en", "lang_code": "de"}}, "session.lang_code"),
            ({"type": "session.update", "session": []}, "session"),
        ):
            await session.socket.send(json.dumps({**event, "event_id": "mine"}))
            error = await session.error()
            assert error["param"] == param and error["event_id"] == "mine", error
            assert error["type"] == "invalid_request_error"
        await session.socket.send("{")
        assert (await session.error())["code"] == "invalid_json"
        await session.send("session.update", session={"model": "another"})
        assert "another" in (await session.error())["message"]
        await session.append(" ")
        await session.send("input_text_buffer.commit")
        assert (await session.error())["code"] == "input_text_buffer_commit_empty"
        assert sound_of(await session.say("Hello.")) == await session.speak(" Hello.")

    stream(app, main)


def test_a_request_that_is_refused_fails_its_utterance(app: FastAPI) -> None:
    """What still comes of its text is not spoken; the next one is."""

    async def main(session: Stream) -> None:
        await session.configure(pitch="high")
        await session.append("First one. And")
        failed = (await session.until("speech.audio.done"))[-1]
        assert failed["status"] == "failed" and "pitch" in failed["error"]["message"]
        assert failed["error"]["code"] == "400"
        await session.append("more of it.")
        await session.send("input_text_buffer.commit")
        await session.until("input_text_buffer.committed")
        await session.configure(pitch=1)
        assert sound_of(await session.say("Next.")) == await session.speak("Next.")

    stream(app, main)


def test_limits(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_stream, "MAX_UTTERANCES", 2)
    app = FakeServer(llm, "--max-realtime-text-bytes=10000", "--max-realtime-sessions=2", "--api-key=secret").app
    key: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer secret"}}

    async def main(url: str) -> None:
        for query, status, headers in (("", 401, {}), ("?model=another", 404, key)):
            with pytest.raises(websockets.InvalidStatus) as caught:
                async with opened(url, query, **headers):
                    pass
            assert caught.value.response.status_code == status
        async with opened(url, **key) as session:
            await session.append("a" * 11_000)
            assert (await session.error())["code"] == "text_limit_exceeded"
            for _ in range(2):
                await session.append("A sentence of some length. " * 100)
                await session.send("input_text_buffer.commit")
            await session.append("One more.")
            while (event := await session.next())["type"] != "error":
                pass
            assert event["error"]["code"] == "too_many_utterances"
            with pytest.raises(websockets.InvalidStatus) as caught:
                async with opened(url, **key):
                    pass
            assert caught.value.response.status_code == 429

    with over_http(app) as url:
        asyncio.run(main(url))


def test_a_client_that_does_not_read(llm: AsyncOmniLLM) -> None:
    """Its connection is closed, and its requests end."""
    app = FakeServer(llm, "--send-timeout-s=0.5").app
    protocol: Any = web_socket_protocol(0.5)
    is_closed = threading.Event()

    def connection_lost(self: Any, error: Exception | None) -> None:
        protocol.connection_lost(self, error)
        is_closed.set()

    async def main(url: str) -> None:
        async with opened(url, max_queue=1, compression=None, close_timeout=1) as session:
            await session.append("A sentence of some length. " * 2000)
            await session.send("input_text_buffer.commit")
            await session.until("speech.audio.delta")
            assert await asyncio.to_thread(is_closed.wait, 60)
            async with asyncio.timeout(60):
                while not is_idle(llm):
                    await asyncio.sleep(0.05)
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    assert (await session.next())["type"] != "speech.audio.done"

    with over_http(app, ws=type("Protocol", (protocol,), {"connection_lost": connection_lost})) as url:
        asyncio.run(main(url))


def test_wrong_events(app: FastAPI) -> None:
    """Whatever comes is refused by an event, and the session goes on."""
    rng = random.Random(7)
    events: list[dict[str, Any]] = [
        {"type": "session.update", "session": {"voice": "bob", "speed": 1.5, "response_format": "wav"}},
        {"type": "input_text_buffer.append", "text": "Hello. "},
        {"type": "input_text_buffer.commit"},
        {"type": "input_text_buffer.clear"},
    ]

    async def main(session: Stream) -> None:
        for _ in range(300):
            await session.socket.send(bad_message(rng, events))
        await session.send("last", event_id="last")
        while (event := await session.next()).get("error", {}).get("event_id") != "last":
            error = event.get("error")
            assert error is None or error["type"] == "invalid_request_error", event
        await session.send("input_text_buffer.clear")
        await session.until("input_text_buffer.cleared")
        await session.configure(voice="ann", speed=1, response_format="pcm")
        assert sound_of(await session.say("Hello.")) == await session.speak("Hello.")

    stream(app, main)


class FakeSpeech:
    """Makes of each text its characters as samples. `fail` is called with each before."""

    reads_pieces, streams = False, True

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self.num_running = self.max_running = 0

    async def events(self, text: str, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        return self._events(text)

    async def _events(self, text: str) -> AsyncGenerator[Any, None]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(0)
            self._fail(text)
            yield SimpleNamespace(sound=text.encode(), num_bytes=len(text))
        finally:
            self.num_running -= 1

    def new_file(self, *_: Any, **__: Any) -> Any:
        async def add(event: Any) -> bytes:
            sound: bytes = event.sound
            return sound

        async def finish() -> bytes:
            return b"."

        return SimpleNamespace(seconds=0.0, output=OUTPUT, add=add, finish=finish)

    def usage_of(self, output: Any) -> SpeechUsage:
        return SpeechUsage(input_tokens=1, output_tokens=2, total_tokens=3)


OUTPUT = SimpleNamespace(outputs=[], finish_reason="stop", stage_metrics=[], finish_reasons=[])


def utter(speech: FakeSpeech, text: str) -> tuple[bytes, dict[str, Any]]:
    """The sound of a text, and its last event."""
    sent: list[dict[str, Any]] = []

    async def send(kind: str, **fields: Any) -> None:
        sent.append({"type": kind, **fields})

    async def main() -> None:
        socket: Any = SimpleNamespace(scope={SCOPE_KEY: RequestContext()})
        given: Any = SimpleNamespace(request=None)
        utterance = speech_stream.Utterance(speech, given, send, socket)  # type: ignore[arg-type]
        utterance.append(text)
        utterance.commit()
        await asyncio.wait_for(utterance.speak(), 30)
        assert utterance.is_done and utterance.num_bytes == 0

    asyncio.run(main())
    return b"".join(event["audio"] for event in sent if event["type"] == "speech.audio.delta"), sent[-1]


def test_a_sentence_without_words_of_the_voice_is_left_out() -> None:
    def fail(text: str) -> None:
        if "No" in text:
            raise InvalidRequestError("no words", "a", 1)

    speech = FakeSpeech(fail)
    sound, done = utter(speech, TEXT)
    assert sound == (SENTENCES[0] + SENTENCES[2]).encode() + b"." and done["status"] == "completed"
    assert done["usage"] == {"input_tokens": 2, "output_tokens": 4, "total_tokens": 6}
    assert speech.num_running == 0 and speech.max_running == 2
    sound, done = utter(speech, SENTENCES[1])
    assert sound == b"" and done["status"] == "failed" and "no words" in done["error"]["message"]


def test_a_full_pipeline() -> None:
    """A sentence that was begun beside another one begins again after it; a first one fails."""
    num_left = 1

    def fail(text: str) -> None:
        nonlocal num_left
        if "Nobody" in text and num_left:
            num_left -= 1
            raise PipelineFullError("full", 1.0)

    sound, done = utter(FakeSpeech(fail), TEXT)
    assert sound == TEXT.encode() + b"." and done["status"] == "completed" and num_left == 0
    num_left = 1
    assert utter(FakeSpeech(fail), SENTENCES[1])[1]["error"]["code"] == "429"


def test_an_error_of_a_stage_fails_the_utterance() -> None:
    def fail(text: str) -> None:
        raise OmniHTTPError("the model made no audio for this input", HTTPStatus.INTERNAL_SERVER_ERROR)

    speech = FakeSpeech(fail)
    assert utter(speech, TEXT)[1]["error"]["type"] == "server_error" and speech.num_running == 0
