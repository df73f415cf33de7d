# SPDX-License-Identifier: Apache-2.0
"""Transcriptions and translations by vLLM's own handlers: a tiny Whisper writes what HF transformers writes."""

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async, start
from tests.entrypoints.fake_pipelines import is_idle, submissions
from tests.entrypoints.openai.fake_server import AppRequest
from tests.entrypoints.openai.media_apps import MODEL, app_of, send, use
from tests.entrypoints.whisper_reference import NUM_TOKENS, WhisperReference, make_sound, split
from vllm_omni import AsyncOmniLLM
from vllm_omni.engine.transcription import without_times
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.subtitles import as_srt, as_vtt
from vllm_omni.testing.media import SAMPLE_RATE
from vllm_omni.testing.tiny.whisper import CLIP_S
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's call for translations.

PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def sound(seconds: float) -> bytes:
    return encode_audio(make_sound(0, seconds), "flac", SAMPLE_RATE)


SOUND, LONG_SOUND = sound(1.7), sound(2.5 * CLIP_S)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[AsyncOmniLLM]:
    with start(whisper) as llm:
        yield as_async(llm)


@pytest.fixture(scope="module")
def app(llm: AsyncOmniLLM, whisper: Path) -> FastAPI:
    client = OmniEngineClient(llm)
    client.default_sampling_params["max_tokens"] = NUM_TOKENS  # Random weights do not stop by themselves.
    return app_of(client, whisper)


@pytest.fixture(scope="module")
def reference(whisper: Path) -> Callable[[str], str]:
    """The text that HF transformers' Whisper writes after a prompt, without times."""
    write = partial(WhisperReference(whisper).write, make_sound(0, 1.7))
    return lambda prompt: without_times(write(prompt)).strip()


def post(app: FastAPI, path: str = PATH, file: bytes = SOUND, **fields: Any) -> Any:
    return send(app, "POST", path, data=fields, files={"file": ("a.flac", file)})


def test_the_text_is_that_of_transformers(app: FastAPI, reference: Callable[[str], str]) -> None:
    async def main(client: openai.AsyncOpenAI) -> tuple[Any, Any, str]:
        fields: Any = {"model": MODEL, "file": ("a.flac", SOUND)}
        german = await client.audio.transcriptions.create(**fields, language="de")
        text = await client.audio.transcriptions.create(**fields, language="en", response_format="text")
        return german, text, (await client.audio.translations.create(**fields, extra_body={"language": "de"})).text

    german, text, translated = use(app, main)
    assert german.text == reference("<|startoftranscript|><|de|><|transcribe|><|0.00|>") != ""
    assert german.usage.type == "duration" and german.usage.seconds == 2
    assert text == reference("<|startoftranscript|><|en|><|transcribe|><|0.00|>")
    assert translated == reference("<|startoftranscript|><|de|><|translate|><|0.00|>")


def test_a_stream_of_openais_events(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        fields: Any = {"model": MODEL, "file": ("a.flac", LONG_SOUND), "language": "en"}
        whole = await client.audio.transcriptions.create(**fields)
        stream: Any = await client.audio.transcriptions.create(**fields, stream=True)
        return whole, [event async for event in stream]

    whole, (*deltas, done) = use(app, main)
    assert {event.type for event in deltas} == {"transcript.text.delta"} and len(deltas) > 2
    assert done.type == "transcript.text.done" and done.text == "".join(event.delta for event in deltas) == whole.text
    assert done.usage.output_tokens == len(split(make_sound(0, 2.5 * CLIP_S))) * NUM_TOKENS


def test_times_in_all_formats(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        return await client.audio.transcriptions.create(
            model=MODEL,
            file=("a.flac", LONG_SOUND),
            response_format="verbose_json",
            timestamp_granularities=["segment"],
        )

    verbose = use(app, main)
    assert verbose.duration == pytest.approx(2.5 * CLIP_S) and verbose.language.isalpha()
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    assert verbose.text == post(app, file=LONG_SOUND).json()["text"] != ""
    assert "".join(segment.text for segment in verbose.segments).split() == verbose.text.split()
    assert verbose.segments[0].start == 0 and verbose.segments[-1].end <= verbose.duration + 0.001
    segments = [segment.model_dump() for segment in verbose.segments]
    srt, vtt = (post(app, file=LONG_SOUND, response_format=name) for name in ("srt", "vtt"))
    assert (srt.text, vtt.text) == (as_srt(segments), as_vtt(segments))
    assert {answer.headers["content-type"] for answer in (srt, vtt)} == {"text/plain; charset=utf-8"}
    translated = post(app, TRANSLATIONS, response_format="verbose_json", language="de").json()
    assert (translated["task"], translated["language"]) == ("translate", "german")


def test_the_prompt_stands_behind_the_token_for_it(app: FastAPI, reference: Callable[[str], str]) -> None:
    start = "<|startoftranscript|><|de|><|transcribe|><|0.00|>"
    assert post(app, language="de", prompt="a red cat").json()["text"] == reference(f"<|startofprev|> a red cat{start}")
    assert post(app, language="de", prompt=" ").json()["text"] == reference(start)


def test_what_follows_the_last_time_is_a_segment_too(app: FastAPI) -> None:
    """Random weights close few segments: most of the text is behind the last time."""
    verbose = post(app, response_format="verbose_json", language="de").json()
    assert verbose["segments"][-1]["end"] == pytest.approx(1.7, abs=0.011)
    assert 0 <= verbose["segments"][0]["no_speech_prob"] <= 1


def test_a_tokenizer_without_times_writes_none(whisper: Path, tmp_path: Path) -> None:
    shutil.copytree(whisper, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if without_times(t["content"])]
    path.write_text(json.dumps(tokenizer))
    with start(tmp_path) as llm:
        client = OmniEngineClient(as_async(llm))
        client.default_sampling_params["max_tokens"] = NUM_TOKENS
        app = app_of(client, tmp_path)
        refused = post(app, response_format="srt")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        assert post(app, language="de").json()["text"]


def test_a_model_of_english_alone_is_not_asked_for_its_language(whisper: Path, tmp_path: Path) -> None:
    shutil.copytree(whisper, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_multilingual": False}))
    write = partial(WhisperReference(tmp_path).write, make_sound(0, 1.7))
    with start(tmp_path) as llm:
        client = OmniEngineClient(as_async(llm))
        client.default_sampling_params["max_tokens"] = NUM_TOKENS
        app = app_of(client, tmp_path)
        text = post(app).json()["text"]
        assert text == without_times(write("<|startoftranscript|><|0.00|>")).strip()
        assert post(app, language="en").json()["text"] == text
        assert post(app, response_format="verbose_json").json()["language"] == "english"
        for path_, fields, param in ((PATH, {"language": "de"}, "language"), (TRANSLATIONS, {}, "model")):
            refused = post(app, path_, **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_subtitles() -> None:
    segments = [{"start": 0.0, "end": 1.2, "text": " A cat."}, {"start": 3661.0, "end": 3662.5, "text": " A dog."}]
    assert as_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,200\nA cat.\n\n2\n01:01:01,000 --> 01:01:02,500\nA dog.\n"
    )
    assert as_vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.200\nA cat.\n\n01:01:01.000 --> 01:01:02.500\nA dog.\n"
    )
    assert (as_srt([]), as_vtt([])) == ("", "WEBVTT\n")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "diarized_json"}, "response_format", "verbose_json, srt or vtt"),
        ({"response_format": "xml"}, "response_format", "'vtt'"),
        ({"response_format": "srt", "stream": "true"}, "stream", "not streamed"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "word"}, "timestamp_granularities", "word"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "word"),
        ({"include[]": "logprobs"}, "include", "log probabilities"),
        ({"language": "klingon"}, "language", "ISO 639-1"),
    ],
)
def test_what_cannot_be_done_is_refused(app: FastAPI, fields: dict[str, Any], param: str, words: str) -> None:
    for path in (PATH, TRANSLATIONS):
        answer = post(app, path, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error


def test_segments_may_be_named_in_every_format(app: FastAPI) -> None:
    """It is the default of OpenAI's API, which the AI SDK sends with json, too."""
    for response_format in ("json", "verbose_json"):
        fields = {"response_format": response_format}
        assert post(app, **fields, **{"timestamp_granularities[]": "segment"}).json() == post(app, **fields).json()


def test_other_requests_are_refused_with_a_reason(app: FastAPI) -> None:
    assert post(app, model="whisper-1").json() == post(app, model=MODEL).json()
    assert post(app, model="other").status_code == 404
    broken = send(app, "POST", PATH, json={"file": "data:audio/wav;base64,AAAA"})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "file")
    chat = send(app, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert chat.status_code == 400 and PATH in chat.json()["error"]["message"]
    description = send(app, "GET", "/v1/pipeline").json()
    assert description["endpoints"] == [PATH, TRANSLATIONS]


def test_a_client_abort_ends_the_request(llm: AsyncOmniLLM, whisper: Path) -> None:
    app = app_of(OmniEngineClient(llm), whisper)
    uri = "data:audio/flac;base64," + base64.b64encode(LONG_SOUND).decode()

    async def main(stream: bool) -> None:
        with submissions(llm) as submitted:
            visit = AppRequest(app, PATH, {"file": uri, "stream": stream, "language": "en"})
            if stream:
                await visit.first_chunk()
            assert await asyncio.to_thread(submitted.wait, 60)
        await visit.disconnect()
        assert is_idle(llm)

    for stream in (True, False):
        asyncio.run(main(stream))
