# SPDX-License-Identifier: Apache-2.0
"""A pipeline with an ASR and a TTS stage: each endpoint runs its part."""

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import ASR, NUM_SAMPLES, SPEAKING, WRITING_STAGE, level
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.asr_stage import load_asr_stage
from vllm_omni.entrypoints.openai.transcription_request import TranscriptionRequest

STAGES = (WRITING_STAGE, SPEAKING | {"accepts": "text"}, ASR)
TEXT = "It has 16000 samples. It is en."


def sound(num_samples: int = 8000) -> bytes:
    """A file of 8 kHz."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(num_samples, np.float32), 8000, format="WAV")
    return file.getvalue()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), STAGES) as llm:
        yield llm


def transcribe(server: FakeServer, path: str = "transcriptions", **fields: Any) -> httpx.Response:
    files = {"file": ("a.wav", fields.pop("data", sound()))}
    return send(server.app, "POST", f"/v1/audio/{path}", files=files, data={"model": "fake", **fields})


def test_formats(server: FakeServer) -> None:
    assert transcribe(server).json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 1.0}}
    assert transcribe(server, response_format="text").text == TEXT
    verbose = transcribe(server, response_format="verbose_json", language="de").json()
    assert (verbose["duration"], verbose["language"]) == (1.0, "german")
    assert verbose["text"] == "It has 16000 samples. It is de."


def test_a_stream(server: FakeServer) -> None:
    response = transcribe(server, stream="true")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["usage"]["seconds"] == 1.0
    assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"] == TEXT


@pytest.mark.parametrize(
    ("given", "language"),
    [("de", "german"), ("DE-at", "german"), ("de_AT", "german"), ("German", "german"), ("castilian", "spanish"),
     ("yue", "cantonese"), ("auto", "")],
)  # fmt: skip
def test_a_language_has_a_code_or_a_name(given: str, language: str) -> None:
    request = TranscriptionRequest(file="data:x", language=given, user="a person")
    assert request.language == (TO_LANGUAGE_CODE[language] if language else None)


def test_what_is_refused(server: FakeServer) -> None:
    for response, words in (
        (transcribe(server, "translations"), "does not translate"),
        (transcribe(server, data=b"no sound"), ""),
        (transcribe(server, response_format="srt"), "not supported"),
        (transcribe(server, language="fr"), "language: Invalid enum value 'fr'; there are en, de (stage 'asr')"),
    ):
        assert response.status_code in (400, 422), response.text
        assert words in response.json()["error"]["message"]


def test_the_sound_at_an_address_is_transcribed_as_it_is_now(
    server: FakeServer, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without API keys; a sound that has not changed is transcribed once."""
    lengths = iter((16_000, 24_000, 24_000))

    async def fetch(url: str, parameter: str) -> tuple[np.ndarray, float]:
        return np.zeros(next(lengths), np.float32), 16_000.0

    async def ask() -> list[str]:
        stage = load_asr_stage(server.client, server.app.state.args)
        assert stage is not None
        monkeypatch.setattr(stage._media, "sound", fetch)
        return [await stage.transcript("https://host/latest.wav", "messages", {}) for _ in range(3)]

    before = sum(stage.num_completed for stage in llm.stats())
    texts = asyncio.run(ask())
    assert ["16000" in text for text in texts] == [True, False, False] and "24000" in texts[2]
    assert sum(stage.num_completed for stage in llm.stats()) == before + 2


def test_a_transcript_is_aborted_with_the_last_that_waits(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = load_asr_stage(server.client, server.app.state.args)
        assert stage is not None
        aborted = asyncio.Event()

        async def fetch(url: str, parameter: str) -> tuple[np.ndarray, float]:
            try:
                await asyncio.Event().wait()
            finally:
                aborted.set()
            raise AssertionError

        monkeypatch.setattr(stage._media, "sound", fetch)
        url = "data:audio/wav;base64,AAAA"
        tasks = [asyncio.create_task(stage.transcript(url, "messages", {})) for _ in range(2)]
        while [made.num_waiting for made in stage._transcripts.values()] != [2]:
            await asyncio.sleep(0)
        for task in tasks:
            assert not aborted.is_set()
            task.cancel()
            await asyncio.wait([task])
        await aborted.wait()
        assert not stage._transcripts

    asyncio.run(main())


def test_speech_runs_the_speaking_stage_alone(server: FakeServer, llm: AsyncOmniLLM) -> None:
    def num_steps() -> list[int]:
        return [stage.num_completed for stage in llm.stats()]

    before = num_steps()
    fields = {"input": "Hello", "voice": "bob", "response_format": "pcm"}
    samples = np.frombuffer(send(server.app, "POST", "/v1/audio/speech", json=fields).content, "<i2") / 32768
    assert len(samples) == 5 * NUM_SAMPLES
    np.testing.assert_allclose(samples, level("Bob"), atol=1e-3)
    assert [after - count for after, count in zip(num_steps(), before, strict=True)] == [0, 1, 0]


def test_the_pipeline_is_described(server: FakeServer) -> None:
    description = server.app.state.omni_description
    assert description.inputs == ["text", "audio"] and description.outputs == ["text", "audio"]
    assert {"/v1/audio/speech", "/v1/audio/transcriptions"} <= set(description.endpoints)
