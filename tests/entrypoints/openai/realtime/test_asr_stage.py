# SPDX-License-Identifier: Apache-2.0
"""Sessions with a model that reads text only: an ASR stage transcribes each turn of sound, once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from tests.entrypoints.fake_pipelines import make_pipeline
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of, types_of
from tests.entrypoints.openai.realtime.test_turns import IDLE, SILENCE, needs_vad, send
from tests.entrypoints.spoken_functions import SPEAKING, writer
from tests.orchestrator.pipelines import function_stage
from vllm_omni import AsyncOmniLLM
from vllm_omni.function_stage import CALLER, FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow


TRANSCRIPTION = "conversation.item.input_audio_transcription"


class LevelParameters(msgspec.Struct):
    language: Literal["en", "de"] = "en"


class LevelStage(FunctionStage):
    """Writes the level of a constant sound; nothing for silence."""

    parameters = LevelParameters

    def begin(self, request: StageRequest, parameters: LevelParameters) -> str:
        return {"en": "It is", "de": "Es ist"}[parameters.language]

    def window(self, state: str, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
        level = float(sources[CALLER].tensors["audio"].median())
        return {"text": f"{state} {level:.1f}." if level else ""}


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
    (item,) = events[-1].response.output
    return item.content[0].transcript


def test_a_turn_of_sound_is_its_text(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def speak(session: Session) -> tuple[list[Any], list[Any]]:
        await session.speak(level(0.5))
        first = await session.respond()
        await session.speak(level(0.3))
        return first, await session.respond()

    async def write(session: Session) -> tuple[list[Any], list[Any]]:
        await session.say("It is 0.5.")
        first = await session.respond()
        await session.say("It is 0.3.")
        return first, await session.respond()

    before = num_transcribed(llm)
    spoken = converse(server.app, speak, model="fake")
    assert num_transcribed(llm) == before + 2, "the first turn is not transcribed again for the second response"
    written = converse(server.app, write, model="fake")
    for heard, read in zip(spoken, written, strict=True):
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
        await session.connection.conversation.item.retrieve(item_id=item.id)
        return events, answer, (await session.until("conversation.item.retrieved"))[-1].item

    before = num_transcribed(llm)
    events, answer, item = converse(server.app, main, model="fake")
    assert types_of(events) == [f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"]
    assert events[-1].transcript == item.content[0].transcript == "It is 0.7."
    assert events[-1].usage.type == "duration" and events[-1].usage.seconds == 0.5
    assert speech_of(answer)
    assert num_transcribed(llm) == before + 1, "client and model read the same text"


def test_a_turn_is_transcribed_with_the_settings_at_its_time(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def configure(session: Session, **settings: Any) -> None:
        await session.configure(audio={"input": {"transcription": settings, "turn_detection": None}})

    async def speak(session: Session) -> tuple[list[str], list[Any]]:
        heard = []
        for value, language in ((0.2, "de"), (0.4, "en")):
            await configure(session, language=language, prompt="a parameter that this stage does not have")
            await session.speak(level(value))
            heard.append((await session.until(f"{TRANSCRIPTION}.completed"))[-1].transcript)
        return heard, await session.respond()

    async def write(session: Session) -> list[Any]:
        await session.say("Es ist 0.2.")
        await session.say("It is 0.4.")
        return await session.respond()

    before = num_transcribed(llm)
    heard, spoken = converse(server.app, speak, model="fake")
    assert heard == ["Es ist 0.2.", "It is 0.4."]
    assert num_transcribed(llm) == before + 2, "the model reads what the client gets"
    written = converse(server.app, write, model="fake")
    assert text_of(spoken) == text_of(written)
    assert spoken[-1].response.usage.input_tokens == written[-1].response.usage.input_tokens


def test_a_setting_that_the_stage_refuses_is_named(server: FakeServer) -> None:
    async def main(session: Session) -> tuple[Any, Any]:
        transcription: Any = {"language": "fr"}
        session_update: Any = {"type": "realtime", "audio": {"input": {"transcription": transcription}}}
        await session.connection.session.update(session=session_update)
        error = await session.error()
        return error, await session.configure()

    error, unchanged = converse(server.app, main, model="fake")
    assert error.param == "session.audio.input.transcription.language"
    assert "Invalid enum value 'fr' (stage 'asr')" in error.message
    assert unchanged.audio.input.transcription is None


def test_a_turn_without_words_is_a_failed_response(server: FakeServer) -> None:
    async def main(session: Session) -> list[Any]:
        await session.speak(level(0))
        return await session.respond()

    response = converse(server.app, main, model="fake")[-1].response
    assert response.status == "failed"
    assert "this sound has no speech" in response.status_details.error.message


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

    async def write(session: Session) -> list[Any]:
        await session.configure(output_modalities=["text"])
        for text in ("Hello.", "", "Still there."):
            await session.say(text)
            events = await session.respond()
        return events

    before = num_transcribed(llm)
    transcript, silent = converse(server.app, stay_silent, model="fake", manual=False)
    assert transcript == "" and num_transcribed(llm) == before
    written = converse(server.app, write, model="fake")
    texts = [events[-1].response.output[0].content[0].text for events in (silent, written)]
    assert texts[0] == texts[1] != ""
