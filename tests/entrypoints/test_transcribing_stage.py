# SPDX-License-Identifier: Apache-2.0
"""A vLLM stage that transcribes, in the place of a function: a tiny Whisper writes what HF transformers writes."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async
from tests.entrypoints.fake_pipelines import is_idle, make_pipeline
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.entrypoints.openai.realtime.sessions import Session, converse
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import ASR, RANDOM, SPEAKING, writer
from tests.entrypoints.whisper_reference import NUM_TOKENS, WhisperReference, make_sound, split
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.testing.media import SAMPLE_RATE
from vllm_omni.testing.tiny.whisper import CLIP_S
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PATH = "/v1/audio/transcriptions"
BEFORE = "<|startofprev|> a red cat"
"""What stands before the prompt of a request with this `prompt`."""
SHORT, OTHER, LONG = make_sound(0, 1.7), make_sound(1, 2.3), make_sound(2, 2.5 * CLIP_S)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(whisper: Path) -> WhisperReference:
    return WhisperReference(whisper)


@pytest.fixture(scope="module")
def llm(whisper: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    """Its stage configuration has a function as the ASR stage, which the arguments replace."""
    transcribing = {
        "engine_type": "AR",
        "engine_args": {"model": str(whisper), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4},
        "runtime": {"memory": "64MiB"},
        "default_sampling_params": {"max_tokens": NUM_TOKENS},
    }
    stages = (writer(tiny_qwen3, **RANDOM), SPEAKING | {"accepts": "text"}, ASR)
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    path = tmp_path_factory.mktemp("config") / "stages.yaml"
    args = {"stage_overrides": {"asr": transcribing}}
    with make_pipeline(OmniLLM, path, stages, args=args, edges=edges) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_llm(llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(llm)


@pytest.fixture(scope="module")
def app(async_llm: AsyncOmniLLM) -> FastAPI:
    return FakeServer(async_llm).app


def prompt(sound: np.ndarray) -> Any:
    return {"stage": "asr", "multi_modal_data": {"audio": (sound, SAMPLE_RATE)}}


def transcribe(llm: OmniLLM, *sounds: np.ndarray, **parameters: Any) -> list[str]:
    outputs = llm.generate([prompt(each) for each in sounds], [None, None, parameters], use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_the_text_is_that_of_transformers(llm: OmniLLM, reference: WhisperReference) -> None:
    expected = [reference.transcribe(sound, "en") for sound in (SHORT, OTHER)]
    assert transcribe(llm, SHORT, language="en") == expected[:1] and expected[0]
    assert transcribe(llm, SHORT, OTHER, language="en") == expected, "at once"


def test_the_parameters_of_a_request(llm: OmniLLM, reference: WhisperReference) -> None:
    translated = reference.transcribe(SHORT, "de", "translate")
    assert transcribe(llm, SHORT, language="de", task="translate") == [translated]
    assert translated != reference.transcribe(SHORT, "de")
    prompted = reference.transcribe(SHORT, "de", before=BEFORE)
    assert transcribe(llm, SHORT, language="de", prompt="a red cat") == [prompted]
    (drawn,) = transcribe(llm, SHORT, language="de", temperature=2.0, seed=1)
    assert drawn != reference.transcribe(SHORT, "de")
    assert transcribe(llm, SHORT, language="de", temperature=2.0, seed=1) == [drawn]


def test_a_long_sound_is_read_in_clips(llm: OmniLLM, reference: WhisperReference) -> None:
    texts = transcribe(llm, LONG, SHORT, language="en")
    assert texts == [reference.transcribe(sound, "en") for sound in (LONG, SHORT)]
    (output,) = llm.generate(prompt(LONG), [None, None, {"language": "en"}], use_tqdm=False)
    num_tokens = len(split(LONG)) * NUM_TOKENS
    assert len(output.outputs[0].token_ids) == output.stage_metrics[0].num_output_tokens == num_tokens
    assert output.outputs[0].finish_reason == "length"


def test_the_model_finds_the_language(llm: OmniLLM, reference: WhisperReference) -> None:
    found = [reference.find_language(sound) for sound in (SHORT, OTHER)]
    expected = [reference.transcribe(sound, code) for sound, code in zip((SHORT, OTHER), found, strict=True)]
    assert transcribe(llm, SHORT, OTHER) == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"language": "xx"}, "Unsupported language: 'xx'"),
        ({"task": "sing"}, "task: Invalid enum value 'sing'"),
        ({"languag": "en"}, "unknown sampling parameter 'languag' for stage 'asr'"),
        ({"n": 2, "temperature": 1.0}, "a sound has one transcript"),
    ],
)
def test_wrong_parameters_are_refused(llm: OmniLLM, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        transcribe(llm, SHORT, **parameters)


def test_a_model_that_does_not_transcribe_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    asr = {**ASR, "engine_type": "AR", "engine_args": {**ASR["engine_args"], "model": str(tiny_qwen3)}}
    del asr["function"]
    with pytest.raises(StageConfigError, match="vLLM does not transcribe with Qwen3ForCausalLM; accepts: audio needs"):
        make_pipeline(OmniLLM, tmp_path / "stages.yaml", [asr | {"runtime": {"memory": "64MiB"}}], args={}).close()


def post(app: FastAPI, path: str = PATH, sound: np.ndarray = SHORT, **fields: Any) -> httpx2.Response:
    files = {"file": ("a.flac", encode_audio(sound, "flac", SAMPLE_RATE))}
    return send(app, "POST", path, data=fields, files=files)


def test_over_http(app: FastAPI, reference: WhisperReference) -> None:
    expected = reference.transcribe(SHORT, "de").strip()
    assert post(app, language="de").json() == {"text": expected, "usage": {"type": "duration", "seconds": 1.7}}
    verbose = post(app, language="de", response_format="verbose_json").json()
    assert (verbose["text"], verbose["language"], verbose["duration"]) == (expected, "german", 1.7)
    translated = post(app, "/v1/audio/translations", language="de").json()["text"]
    assert translated == reference.transcribe(SHORT, "de", "translate").strip()
    prompted = reference.transcribe(SHORT, "de", before=BEFORE).strip()
    assert post(app, language="de", prompt="a red cat", temperature=0).json()["text"] == prompted


def test_a_stream_of_a_long_sound(app: FastAPI, reference: WhisperReference) -> None:
    response = post(app, sound=LONG, language="en", stream="true")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"transcript.text.delta"} and len(deltas) > 3
    assert "".join(event["delta"] for event in deltas) == done["text"] == reference.transcribe(LONG, "en")


def test_a_chat_reads_the_transcript(app: FastAPI, reference: WhisperReference) -> None:
    heard = reference.transcribe(SHORT, reference.find_language(SHORT)).strip()
    data = base64.b64encode(encode_audio(SHORT, "wav", SAMPLE_RATE)).decode()

    def chat(part: dict[str, Any]) -> Any:
        fields = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 8, "temperature": 0}
        response = send(app, "POST", "/v1/chat/completions", json=fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    spoken = chat({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    assert spoken == chat({"type": "text", "text": heard})


@pytest.mark.parametrize("settings", [{}, {"language": "de"}, {"language": "de", "prompt": "a red cat"}])
def test_a_session_gets_the_transcript(app: FastAPI, llm: OmniLLM, settings: dict[str, str]) -> None:
    samples = np.round(make_sound(3, 1.0) * 32767).astype(np.int16)

    async def main(session: Session) -> list[Any]:
        transcription: Any = {"model": "any", **settings}
        await session.configure(audio={"input": {"transcription": transcription, "turn_detection": None}})
        await session.speak(samples)
        return await session.until("conversation.item.input_audio_transcription.completed")

    events = converse(app, main, model="fake")
    sound = (samples / 32768).astype(np.float32)
    heard: Any = {"stage": "asr", "multi_modal_data": {"audio": (sound, 24_000)}}
    (expected,) = llm.generate(heard, [None, None, settings], use_tqdm=False)
    assert events[-1].transcript == expected.outputs[0].text.strip() != ""


def test_a_client_abort_ends_all_clips(app: FastAPI, async_llm: AsyncOmniLLM) -> None:
    many_clips = np.tile(LONG, 20)  # It must not end by itself.
    uri = "data:audio/flac;base64," + base64.b64encode(encode_audio(many_clips, "flac", SAMPLE_RATE)).decode()
    activity = async_llm._pipeline.orchestrator.activity

    async def main(stream: bool) -> None:
        visit = AppRequest(app, PATH, {"file": uri, "stream": stream, "language": "en"})
        if stream:
            await visit.first_chunk()
        while not activity()["asr"]:
            await asyncio.sleep(0)
        await visit.disconnect()
        assert is_idle(async_llm)

    for stream in (True, False):
        asyncio.run(main(stream))
