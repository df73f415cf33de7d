# SPDX-License-Identifier: Apache-2.0
"""Sessions with a model that reads text only: an ASR stage transcribes each turn of sound, once."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from tests.entrypoints.fake_pipelines import make_pipeline
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.realtime.level_detector import PausingDetector
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of, types_of
from tests.entrypoints.openai.realtime.test_turns import IDLE, SILENCE, needs_vad, send
from tests.entrypoints.openai.small_apps import send as send_request
from tests.entrypoints.spoken_functions import SPEAKING, writer
from tests.entrypoints.wav_files import as_uri
from tests.orchestrator.pipelines import function_stage
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.function_stage import CALLER, FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow


TRANSCRIPTION = "conversation.item.input_audio_transcription"


class LevelParameters(msgspec.Struct):
    language: Literal["en", "de"] = "en"


class LevelStage(FunctionStage):
    """Writes the level of a constant sound; nothing for silence and quiet noises."""

    parameters = LevelParameters

    def begin(self, request: StageRequest, parameters: LevelParameters) -> str:
        return {"en": "It is", "de": "Es ist"}[parameters.language]

    def window(self, state: str, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
        level = round(float(sources[CALLER].tensors["audio"].median()), 1)
        return {"text": f"{state} {level}." if level else ""}


ASR = function_stage(2, "asr", LevelStage, (), "text") | {"accepts": "audio"}


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    stages = (writer(tiny_qwen3, max_tokens=8, temperature=0.0, ignore_eos=True), SPEAKING | {"accepts": "text"}, ASR)
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    path = tmp_path_factory.mktemp("config") / "stages.yaml"
    with make_pipeline(AsyncOmniLLM, path, stages, args={}, edges=edges) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: AsyncOmniLLM) -> FakeServer:
    return FakeServer(llm)


def level(value: float) -> np.ndarray:
    """Half a second of 24 kHz."""
    return np.full(12_000, round(value * 32768), np.int16)


def num_transcribed(llm: AsyncOmniLLM) -> int:
    return {stage.name: stage.num_completed for stage in llm.stats()}["asr"]


def text_of(events: list[Any]) -> str:
    part = events[-1].response.output[0].content[0]
    return part.transcript if part.type == "output_audio" else part.text


def written(server: FakeServer, *texts: str, **settings: Any) -> list[list[Any]]:
    """The events of the response to each message of a session of texts."""

    async def main(session: Session) -> list[list[Any]]:
        await session.configure(**settings)
        answers = []
        for text in texts:
            await session.say(text)
            answers.append(await session.respond())
        return answers

    return converse(server.app, main, model="fake")


def test_a_turn_of_sound_is_its_text(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def speak(session: Session) -> list[list[Any]]:
        answers = []
        for value in (0.5, 0.3):
            await session.speak(level(value))
            answers.append(await session.respond())
        return answers

    before = num_transcribed(llm)
    spoken = converse(server.app, speak, model="fake")
    assert num_transcribed(llm) == before + 2, "the first turn is not transcribed again for the second response"
    for heard, read in zip(spoken, written(server, "It is 0.5.", "It is 0.3."), strict=True):
        assert heard[-1].response.status == read[-1].response.status == "incomplete", "at the limit of tokens"
        assert text_of(heard) == text_of(read)
        assert heard[-1].response.usage.input_tokens == read[-1].response.usage.input_tokens
        assert speech_of(heard) == speech_of(read) != b""


def test_the_client_gets_the_transcript(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def main(session: Session) -> tuple[list[Any], list[Any], Any]:
        await session.configure(audio={"input": {"transcription": {"model": "any"}, "turn_detection": None}})
        item = await session.speak(level(0.7))
        events = await session.until(f"{TRANSCRIPTION}.completed")
        answer = await session.respond()
        return events, answer, await session.retrieve(item.id)

    before = num_transcribed(llm)
    events, answer, item = converse(server.app, main, model="fake")
    assert types_of(events) == [f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"]
    assert events[-1].transcript == item.content[0].transcript == "It is 0.7."
    assert events[-1].usage.type == "duration" and events[-1].usage.seconds == 0.5
    assert speech_of(answer)
    assert num_transcribed(llm) == before + 1, "client and model read the same text"


def test_a_turn_is_transcribed_with_the_settings_at_its_time(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def speak(session: Session) -> tuple[list[str], list[list[Any]]]:
        heard, answers = [], []
        for value, language in ((0.2, "de"), (0.4, "en")):
            settings = {"language": language, "prompt": "a parameter that this stage does not have"}
            await session.configure(audio={"input": {"transcription": settings, "turn_detection": None}})
            await session.speak(level(value))
            heard.append((await session.until(f"{TRANSCRIPTION}.completed"))[-1].transcript)
            answers.append(await session.respond())
        return heard, answers

    before = num_transcribed(llm)
    heard, spoken = converse(server.app, speak, model="fake")
    assert heard == ["Es ist 0.2.", "It is 0.4."]
    assert num_transcribed(llm) == before + 2, "the model reads what the client gets"
    expected = written(server, "Es ist 0.2.", "It is 0.4.")
    assert [text_of(events) for events in spoken] == [text_of(events) for events in expected]
    tokens = [[events[-1].response.usage.input_tokens for events in each] for each in (spoken, expected)]
    assert tokens[0] == tokens[1]


def test_a_setting_that_the_stage_refuses_is_named(server: FakeServer) -> None:
    async def main(session: Session) -> tuple[Any, Any]:
        transcription: Any = {"language": "fr"}
        session_update: Any = {"type": "realtime", "audio": {"input": {"transcription": transcription}}}
        await session.connection.session.update(session=session_update)
        error = await session.error()
        return error, await session.configure()

    error, unchanged = converse(server.app, main, model="fake")
    assert error.param == "session.audio.input.transcription.language"
    assert "Invalid enum value 'fr'; there are en, de (stage 'asr')" in error.message
    assert unchanged.audio.input.transcription is None


def test_a_turn_without_words_is_an_empty_text(server: FakeServer) -> None:
    """In its response and in those after it."""

    async def speak(session: Session) -> list[str]:
        texts = []
        for value in (0, 0.5):
            await session.speak(level(value))
            texts.append(text_of(await session.respond()))
        return texts

    expected = [text_of(events) for events in written(server, "", "It is 0.5.")]
    assert converse(server.app, speak, model="fake") == expected


def test_a_sound_without_words_is_an_empty_text_of_a_chat(server: FakeServer) -> None:
    def ask(*parts: Any) -> str:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
        answer = send_request(server.app, "POST", "/v1/chat/completions", json={"model": "fake", "messages": messages})
        return answer.json()["choices"][0]["message"]["content"]

    silence = {"url": as_uri(encode_audio(np.zeros(12_000, np.float32), "wav", 24_000))}
    assert ask({"type": "audio_url", "audio_url": silence}) == ask({"type": "text", "text": ""}) != ""


COUGH = level(0.01)
SPEECH = level(0.5)
PAUSE = np.zeros(2400, np.int16)


def test_a_turn_is_transcribed_from_its_pause_on(
    server: FakeServer, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has ended, and once: the transcript has what was heard before the pause."""
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", PausingDetector)
    hearing = {"transcription": {"model": "any"}, "turn_detection": {"type": "server_vad"}}

    async def main(session: Session) -> None:
        await session.configure(audio={"input": hearing}, output_modalities=["text"])
        for value in (0.2, 0.3):  # The user goes on after the first pause.
            before = num_transcribed(llm)
            await send(session, np.concatenate([level(value), PAUSE]))
            while num_transcribed(llm) == before:
                await asyncio.sleep(0.01)
        await send(session, np.concatenate([PAUSE, PAUSE]))
        events = await session.until("response.done")
        (done,) = (event for event in events if event.type == f"{TRANSCRIPTION}.completed")
        assert done.transcript == "It is 0.2." and num_transcribed(llm) == before + 1, "the median of both levels"

    converse(server.app, main, model="fake", manual=False)


async def hear_nothing(session: Session) -> None:
    """A microphone. What it sends before the session has ended the turn without words is not measured."""
    while True:
        await send(session, SILENCE)
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("level_detector")
def test_silence_after_a_cough_is_measured(server: FakeServer) -> None:
    hearing = {"transcription": {"model": "any"}, "turn_detection": IDLE}

    async def main(session: Session) -> None:
        await session.configure(audio={"input": hearing}, output_modalities=["text"])
        await send(session, np.concatenate([COUGH, PAUSE]))
        await session.until(f"{TRANSCRIPTION}.completed")
        microphone = asyncio.create_task(hear_nothing(session))
        events = await session.until("response.done")
        microphone.cancel()
        assert events[0].type == "input_audio_buffer.timeout_triggered"

    converse(server.app, main, model="fake", manual=False)


@pytest.mark.usefixtures("level_detector")
def test_a_session_hears_after_its_limit_of_sound(server: FakeServer) -> None:
    """Of earlier turns the text is left."""
    values = (0.2, 0.3, 0.4, 0.5)

    async def speak(session: Session) -> tuple[list[str], Any]:
        await session.configure(audio={"input": {"turn_detection": {"type": "server_vad"}}}, output_modalities=["text"])
        responses = []
        for value in values:
            await send(session, np.concatenate([level(value), PAUSE]))
            responses.append((await session.until("response.done"))[-1].response)
        first = next(event.item for event in session.events if event.type == "conversation.item.added")
        kept = await session.retrieve(first.id)
        return [response.output[0].content[0].text for response in responses], kept.content[0].audio

    app = FakeServer(server.client.llm, "--max-realtime-audio-s=1").app
    heard, kept = converse(app, speak, model="fake", manual=False)
    assert kept == ""
    expected = written(server, *(f"It is {value}." for value in values), output_modalities=["text"])
    assert heard == [text_of(events) for events in expected]


@pytest.mark.usefixtures("level_detector")
def test_a_response_that_waits_for_words_is_cancelled_without_a_trace(
    server: FakeServer, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By speech, and by the client, to which nothing is active yet."""
    heard = asyncio.Event()
    transcript = ASRStage.transcript

    async def later(*args: Any) -> str:
        await heard.wait()
        return await transcript(*args)

    monkeypatch.setattr(ASRStage, "transcript", later)

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"turn_detection": {"type": "server_vad"}}})
        await send(session, np.concatenate([SPEECH, PAUSE, SPEECH, PAUSE]))
        for _ in range(2):
            await session.until("input_audio_buffer.committed")
        await session.connection.response.cancel()
        events = await session.until("conversation.item.done")
        assert (await session.error()).code == "response_cancel_not_active"
        heard.set()
        await send(session, np.concatenate([SPEECH, PAUSE]))
        events = await session.until("response.done")
        assert types_of(events).count("response.created") == 1 and events[-1].response.status == "incomplete"

    converse(server.app, main, model="fake", manual=False)


@needs_vad
def test_silence_after_an_answer_has_no_words(server: FakeServer, llm: AsyncOmniLLM) -> None:
    """`idle_timeout_ms`: the model reads an empty turn, which is not transcribed, in this response and later ones."""

    async def stay_silent(session: Session) -> tuple[str, list[Any]]:
        hearing = {"transcription": {"model": "any"}, "turn_detection": IDLE}
        await session.configure(audio={"input": hearing}, output_modalities=["text"])
        await session.say("Hello.")
        await session.respond()
        await send(session, SILENCE)
        events = await session.until("response.done")
        if not (done := [event for event in events if event.type == f"{TRANSCRIPTION}.completed"]):
            done = (await session.until(f"{TRANSCRIPTION}.completed"))[-1:]
        await session.say("Still there.")
        return done[0].transcript, await session.respond()

    before = num_transcribed(llm)
    transcript, silent = converse(server.app, stay_silent, model="fake", manual=False)
    assert transcript == "" and num_transcribed(llm) == before
    expected = written(server, "Hello.", "", "Still there.", output_modalities=["text"])
    assert text_of(silent) == text_of(expected[-1]) != ""
