# SPDX-License-Identifier: Apache-2.0
"""Transcriptions, with OpenAI's client: the text is that of a chat with the sound and the request to transcribe it."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.fake_pipelines import STAGES, is_idle, running, submissions
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.entrypoints.openai.media_apps import MODEL, app_of, send, server_args, use, with_flags
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import install
from vllm_omni.testing.media import SAMPLE_RATE, make_audio

GROUP = "llm"
PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
NUM_TOKENS = 24
SOUND = encode_audio(make_audio(0, 0.7).astype(np.float32), "flac", SAMPLE_RATE)
URI = "data:audio/flac;base64," + base64.b64encode(SOUND).decode()


def make_app(llm: AsyncOmniLLM, model: Path, num_tokens: int = NUM_TOKENS) -> FastAPI:
    """A model of random weights does not stop before `num_tokens`."""
    client = OmniEngineClient(llm)
    client.default_sampling_params["max_tokens"] = num_tokens
    return app_of(client, model)


@pytest.fixture(scope="module")
def qwen3_app(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    return make_app(talking_async_llm, tiny_qwen3_omni_moe)


@pytest.fixture(scope="module")
def qwen2_5_app(qwen2_5_async_llm: AsyncOmniLLM, tiny_qwen2_5_omni: Path) -> FastAPI:
    return make_app(qwen2_5_async_llm, tiny_qwen2_5_omni)


@pytest.fixture(params=["qwen3_app", "qwen2_5_app"])
def app(request: pytest.FixtureRequest) -> FastAPI:
    return request.getfixturevalue(request.param)


async def chat(client: openai.AsyncOpenAI, instruction: str) -> Any:
    content: Any = [
        {"type": "audio_url", "audio_url": {"url": URI}},
        {"type": "text", "text": instruction},
    ]
    return await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0.0, modalities=["text"]
    )


def test_the_text_is_that_of_a_chat(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        whole = await client.audio.transcriptions.create(model=MODEL, file=("a.flac", SOUND))
        expected = await chat(client, "Transcribe the audio into text.")
        assert whole.text == expected.choices[0].message.content != ""
        assert whole.usage is not None and whole.usage.type == "tokens"
        assert whole.usage.output_tokens == expected.usage.completion_tokens == NUM_TOKENS
        assert whole.usage.input_tokens == expected.usage.prompt_tokens > 15  # The sound is in it.

        fields: dict[str, Any] = {"model": MODEL, "file": SOUND, "language": "ZH", "prompt": "A name: Li."}
        told = await client.audio.transcriptions.create(**fields)
        expected = await chat(client, "Transcribe the Chinese audio into text. A name: Li.")
        assert told.text == expected.choices[0].message.content != whole.text

        text = await client.audio.transcriptions.create(**fields, response_format="text")
        assert text == told.text

    use(app, main)


def test_a_translation_is_asked_for_in_a_chat(qwen3_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        for fields, instruction in (
            ({}, "Translate the audio into English text."),
            ({"language": "zh", "prompt": "A name: Li."}, "Translate the Chinese audio into English text. A name: Li."),
        ):
            answer = await client._client.post(TRANSLATIONS, json={"file": URI, **fields})
            assert answer.json()["text"] == (await chat(client, instruction)).choices[0].message.content

    use(qwen3_app, main)


def test_the_stage_configuration_states_the_prompts(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    client = OmniEngineClient(talking_async_llm)
    assert client.stage is not None
    client.stage = msgspec.structs.replace(
        client.stage, transcription_prompt="Transcribe what is said.", translation_prompt="{language} to English:"
    )
    client.config = client.config.with_stage_args([client.stage, *client.config.stage_args[1:]])
    client.default_sampling_params["max_tokens"] = NUM_TOKENS
    app = app_of(client, tiny_qwen3_omni_moe)

    async def main(client: openai.AsyncOpenAI) -> None:
        for path, instruction in ((PATH, "Transcribe what is said."), (TRANSLATIONS, "French to English:")):
            answer = await client._client.post(path, json={"file": URI, "language": "fr"})
            assert answer.json()["text"] == (await chat(client, instruction)).choices[0].message.content

    use(app, main)


def test_a_translation_has_no_times(qwen3_app: FastAPI) -> None:
    answer = send(qwen3_app, "POST", TRANSLATIONS, json={"file": URI, "response_format": "srt"})
    refused(answer, "response_format", "not when", "json, text or verbose_json")


def test_verbose_json_has_the_length_of_the_sound_and_no_times(app: FastAPI) -> None:
    """LiteLLM and the AI SDK ask for it, and for segments, without being told to."""
    default = {"timestamp_granularities[]": "segment"}
    answer = post(app, response_format="verbose_json", **default)
    expected = post(app, **default).json()["text"]
    assert answer.headers["x-finish-reason"] == "length"
    duration = pytest.approx(0.7)
    assert answer.json() == {
        "task": "transcribe", "text": expected, "language": "", "duration": duration,
        "usage": {"type": "duration", "seconds": duration},
    }  # fmt: skip
    fields = {"file": URI, "response_format": "verbose_json", "language": "de"}
    translation = send(app, "POST", TRANSLATIONS, json=fields).json()
    assert (translation["task"], translation["language"], translation["duration"]) == ("translate", "german", duration)


def test_a_stream_of_openais_events(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        whole = await client.audio.transcriptions.create(model=MODEL, file=SOUND)
        stream = await client.audio.transcriptions.create(model=MODEL, file=SOUND, stream=True)
        *deltas, done = [event async for event in stream]
        assert len(deltas) > 2 and {event.type for event in deltas} == {"transcript.text.delta"}
        assert done.type == "transcript.text.done" and done.text == whole.text
        assert "".join(event.delta for event in deltas) == whole.text  # type: ignore[union-attr]
        assert done.usage is not None and whole.usage is not None
        assert done.usage.model_dump() == whole.usage.model_dump()

    use(app, main)


def test_a_transcript_that_was_cut_says_so(qwen3_app: FastAPI) -> None:
    for response_format, media_type in {"json": "application/json", "text": "text/plain"}.items():
        answer = send(qwen3_app, "POST", PATH, json={"file": URI, "response_format": response_format})
        assert answer.headers["x-finish-reason"] == "length"
        assert answer.headers["content-type"].startswith(media_type)
    answer = send(qwen3_app, "POST", PATH, json={"file": URI, "stream": True})
    assert '"finish_reason":"length"' in answer.text.split("data: ")[-1]


def test_the_temperature_is_applied(qwen3_app: FastAPI) -> None:
    texts = {send(qwen3_app, "POST", PATH, json={"file": URI, "temperature": t}).json()["text"] for t in (0, 0, 1, 1)}
    assert len(texts) == 3


def test_a_client_abort_ends_the_request(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    app = make_app(talking_async_llm, tiny_qwen3_omni_moe, num_tokens=900)

    async def main(stream: bool) -> None:
        with submissions(talking_async_llm) as submitted:
            visit = AppRequest(app, PATH, {"file": URI, "stream": stream})
            if stream:
                await visit.first_chunk()
                assert visit.status == 200 and b"transcript.text.delta" in visit.chunks[0]
            assert await asyncio.to_thread(submitted.wait, 60)
        await visit.disconnect()
        assert is_idle(talking_async_llm)

    for stream in (True, False):
        asyncio.run(main(stream))


def post(app: FastAPI, **fields: Any) -> httpx2.Response:
    return send(app, "POST", PATH, data=fields, files={"file": ("a.flac", SOUND)})


def refused(answer: httpx2.Response, param: str | None, *words: str, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "verbose_json", "stream": "true"}, "stream", ["not streamed", "json or text"]),
        ({"response_format": "srt"}, "response_format", ["not when", "json, text or verbose_json"]),
        ({"response_format": "vtt"}, "response_format", ["not when"]),
        ({"response_format": "diarized_json"}, "response_format", ["who speaks"]),
        ({"response_format": "xml"}, "response_format", []),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", ["not when"]),
        ({"include[]": "logprobs"}, "include", ["/v1/chat/completions"]),
        ({"known_speaker_names[]": "a"}, "known_speaker_names", ["who speaks"]),
        ({"keywords[]": "a"}, "keywords", ["prompt"]),
        ({"languages[]": "en"}, "languages", ["language"]),
        ({"language": "klingon"}, "language", ["ISO 639-1"]),
        ({"temperature": "1.1"}, "temperature", []),
        ({"prompt": "x" * 5000}, "prompt", []),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", ["as a whole"]),
        ({"colour": "red"}, "colour", []),
    ],
)
def test_what_cannot_be_done_is_refused(
    qwen3_app: FastAPI, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    refused(post(qwen3_app, **fields), param, *words)


WRONG_FILES = {
    "data:audio/wav;base64,AAAA": "cannot be read",
    "data:,": "",
    "file:///etc/passwd": "allowed-local-media-path",
    "http://127.0.0.1:1/a.wav": "public address",
    "http://169.254.169.254/latest": "public address",
}


def test_a_wrong_file_is_refused(qwen3_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        for file, words in WRONG_FILES.items():
            for stream in (False, True):
                answer = await client._client.post(PATH, json={"file": file, "stream": stream})
                refused(answer, "file", words)

    install(server_args(MODEL))  # Connections belong to an event loop.
    use(with_flags(qwen3_app), main)


def test_requests_without_a_file_or_for_another_model(qwen3_app: FastAPI) -> None:
    refused(send(qwen3_app, "POST", PATH, data={"language": "en"}), "file")
    refused(send(qwen3_app, "POST", PATH, json={}), "file")
    assert send(qwen3_app, "POST", PATH, content=b"x", headers={"content-type": "text/plain"}).status_code == 415
    refused(post(qwen3_app, model="whisper-2"), "model", MODEL, status=404)


def test_openais_names_of_models_mean_the_served_one(qwen3_app: FastAPI) -> None:
    names = ("whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")
    answers = [post(qwen3_app, model=name) for name in (MODEL, *names)]
    assert len({answer.json()["text"] for answer in answers}) == 1
    strict = with_flags(qwen3_app, "--no-model-aliases")
    assert [post(strict, model=name).status_code for name in names] == [404] * 4
    for name in ("tts-1", "dall-e-3"):  # of other endpoints
        refused(post(qwen3_app, model=name), "model", MODEL, status=404)


def test_a_sound_that_is_too_long_for_the_model(qwen3_app: FastAPI) -> None:
    long = encode_audio(make_audio(0, 100.0).astype(np.float32), "flac", SAMPLE_RATE)
    answer = send(qwen3_app, "POST", PATH, files={"file": ("a.flac", long)})
    assert answer.status_code == 400 and "1024" in answer.text


def test_a_model_that_does_not_accept_audio(text_async_llm: AsyncOmniLLM, tiny_qwen3: Path, tmp_path: Path) -> None:
    refused(post(make_app(text_async_llm, tiny_qwen3)), "model", "does not transcribe")
    with running(AsyncOmniLLM, tmp_path, STAGES[:1]) as llm:
        refused(post(FakeServer(llm).app), "model", "does not transcribe")
