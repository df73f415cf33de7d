# SPDX-License-Identifier: Apache-2.0
"""Reference voices over HTTP, with a model that imitates them: in a request, and uploaded."""

import asyncio
import base64
import copy
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from fastapi import FastAPI

from tests.entrypoints.fake_pipelines import submissions
from tests.entrypoints.openai.media_apps import MODEL, app_of, send, server_args, use, with_flags
from tests.entrypoints.wav_files import as_uri, float_wav
from tests.model_executor.models.csm.prompts import sound
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai.audio_formats import to_pcm16
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import install
from vllm_omni.model_executor.models.csm.prompt import CsmPromptProcessor

GROUP = "llm"
SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
TEXT, REF_TEXT = "water and wind", "good day"
CONSENT = "I am the speaker and I agree."
KEYS = ("--api-key", "one", "other")


def wav(seconds: float = 0.6, seed: int = 1) -> bytes:
    return float_wav(sound(seconds, seed))


RECORDING = wav()
UPLOAD: dict[str, Any] = {
    "name": "Narrator", "audio_sample": as_uri(RECORDING), "consent": CONSENT, "ref_text": REF_TEXT,
}  # fmt: skip


@pytest.fixture(scope="module")
def app(csm_async_llm: AsyncOmniLLM, tiny_csm: Path) -> FastAPI:
    return app_of(OmniEngineClient(csm_async_llm), tiny_csm)


@pytest.fixture
def fresh_app(app: FastAPI) -> FastAPI:
    """Without voices."""
    return with_flags(app)


@pytest.fixture(scope="module")
def offline(csm_llm: OmniLLM) -> Any:
    """The samples as int16, of the same fields offline."""

    @functools.cache
    def speak(text: str = TEXT, **fields: Any) -> np.ndarray:
        fields = {"ref_audio": sound(0.6, 1), "ref_text": REF_TEXT, **fields}
        given = {name: value for name, value in fields.items() if value is not None}
        (output,) = csm_llm.generate({"prompt": text, "additional_information": given}, use_tqdm=False)
        return to_pcm16(output.multimodal_output["audio"].numpy())

    return speak


def check(answer: Any, expected: np.ndarray) -> None:
    """A step of int16 is for the last bits of sums in another order."""
    samples = np.frombuffer(answer if isinstance(answer, bytes) else answer.content, "<i2")
    assert len(samples) == len(expected) > 1000
    assert np.abs(samples.astype(int) - expected).max() <= 1


def speak(app: FastAPI, **fields: Any) -> httpx2.Response:
    return send(app, "POST", SPEECH, json={"input": TEXT, "response_format": "pcm", **fields})


def refused(answer: httpx2.Response, param: str | None, *words: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error


class Host(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(RECORDING)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    """An address of the recording in the server's own network."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.wav"
        server.shutdown()


def test_a_reference_in_a_request_is_that_of_offline_prompts(app: FastAPI, offline: Any) -> None:
    check(speak(app, ref_audio=as_uri(RECORDING), ref_text=REF_TEXT), offline())
    form = {"input": TEXT, "response_format": "pcm", "ref_text": REF_TEXT, "voice": "3", "stream": "false"}
    uploaded = send(app, "POST", SPEECH, data=form, files={"ref_audio": ("a.wav", RECORDING)})
    check(uploaded, offline(speaker="3"))
    assert np.abs(offline()[:1000].astype(int) - offline(ref_audio=None, ref_text=None)[:1000]).max() > 1


def test_an_address_of_an_allowed_host(app: FastAPI, host: str, offline: Any) -> None:
    flags = ("--allowed-media-domains", "127.0.0.1")
    install(server_args(MODEL, *flags))
    try:
        check(speak(with_flags(app, *flags), ref_audio=host, ref_text=REF_TEXT), offline())
    finally:
        install(server_args(MODEL))


def test_earlier_turns(app: FastAPI, offline: Any) -> None:
    turns = [
        {"voice": "1", "text": "one river", "audio": as_uri(wav(0.8, 2))},
        {"text": "my house", "audio": as_uri(wav(0.3, 3))},
    ]
    context = Turns(
        [{"speaker": "1", "text": "one river", "audio": sound(0.8, 2)}, {"text": "my house", "audio": sound(0.3, 3)}]
    )
    expected = offline(ref_audio=None, ref_text=None, context=context)
    check(speak(app, context=turns), expected)
    check(send(app, "POST", SPEECH, data={"input": TEXT, "response_format": "pcm", "context": json.dumps(turns)}),
          expected)  # fmt: skip


class Turns(list):
    """Of one test."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_openais_client(fresh_app: FastAPI, offline: Any) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        voice = await client.audio.voices.create(
            name="Narrator",
            audio_sample=("a.wav", RECORDING, "audio/wav"),
            consent=CONSENT,
            extra_body={"ref_text": REF_TEXT},
        )
        assert (voice.object, voice.type, voice.name) == ("audio.voice", "audio_sample", "Narrator")
        fields: dict[str, Any] = {"model": MODEL, "input": TEXT, "response_format": "pcm"}
        for name in ("Narrator", "NARRATOR", voice.id, {"id": voice.id}):
            speech = await client.audio.speech.create(voice=name, **fields)
            check(speech.content, offline())
        reference = {"ref_audio": as_uri(RECORDING), "ref_text": REF_TEXT}
        speech = await client.audio.speech.create(voice="default", extra_body=reference, **fields)
        check(speech.content, offline())
        deleted = await client.audio.voices.delete(voice.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (voice.id, True, "audio.voice.deleted")
        with pytest.raises(openai.BadRequestError, match="unknown voice 'Narrator'"):
            await client.audio.speech.create(voice="Narrator", **fields)
        with pytest.raises(openai.NotFoundError):
            await client.audio.voices.delete(voice.id)

    use(fresh_app, main)


def test_an_uploaded_voice_is_described_and_listed(fresh_app: FastAPI) -> None:
    voice = send(fresh_app, "POST", VOICES, json=UPLOAD).json()
    assert voice["expires_at"] == pytest.approx(voice["created_at"] + 24 * 3600, abs=1)
    assert (voice["seconds"], voice["consent"], voice["ref_text"]) == (0.6, CONSENT, REF_TEXT)
    assert "audio_sample" not in voice
    for name in (voice["id"], "narrator"):
        assert send(fresh_app, "GET", f"{VOICES}/{name}").json() == voice
    answer = send(fresh_app, "GET", VOICES).json()
    assert answer["uploaded_voices"] == [voice]
    assert answer["voices"] == [{"id": name, "name": name} for name in "0123456789"]
    assert send(fresh_app, "DELETE", f"{VOICES}/narrator").status_code == 200
    assert send(fresh_app, "GET", VOICES).json()["uploaded_voices"] == []


def test_a_voice_is_visible_to_its_api_key_only(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        one, other = (client.with_options(api_key=key) for key in ("one", "other"))
        fields: dict[str, Any] = {"name": "mine", "consent": CONSENT, "extra_body": {"ref_text": REF_TEXT}}
        mine = await one.audio.voices.create(audio_sample=RECORDING, **fields)
        request: dict[str, Any] = {"model": MODEL, "input": "a", "response_format": "pcm"}
        for name in ("mine", mine.id):
            with pytest.raises(openai.BadRequestError, match="unknown voice"):
                await other.audio.speech.create(voice=name, **request)
            for call in (other.audio.voices.delete, lambda name: other.get(f"/audio/voices/{name}", cast_to=dict)):
                with pytest.raises(openai.NotFoundError) as hidden:
                    await call(name)
                with pytest.raises(openai.NotFoundError) as missing:
                    await call("none")
                assert str(hidden.value).replace(name, "none") == str(missing.value)
        with pytest.raises(openai.AuthenticationError):
            await client.get("/audio/voices", cast_to=dict)
        assert (await other.get("/audio/voices", cast_to=dict))["uploaded_voices"] == []
        theirs = await other.audio.voices.create(audio_sample=RECORDING, **fields)  # The name is free.
        await other.audio.voices.delete(theirs.id)
        assert (await one.audio.speech.create(voice="mine", **request)).content

    use(with_flags(app, *KEYS), main)


def test_public_lists_show_no_voice_of_a_key(app: FastAPI) -> None:
    """Open WebUI asks for voices and models without its key."""
    open_app = with_flags(app, *KEYS, "--public-lists")
    key = {"authorization": "Bearer one"}
    assert send(open_app, "POST", VOICES, json=UPLOAD, headers={"authorization": ""}).status_code == 401
    assert send(open_app, "POST", VOICES, json=UPLOAD, headers=key).status_code == 200
    without, other, own = (
        send(open_app, "GET", VOICES, headers={"authorization": f"Bearer {key}"}).json() for key in ("", "other", "one")
    )
    assert [len(answer["uploaded_voices"]) for answer in (without, other, own)] == [0, 0, 1]
    assert without["voices"] == own["voices"] == [{"id": name, "name": name} for name in "0123456789"]
    assert send(open_app, "GET", f"{VOICES}/narrator", headers={"authorization": ""}).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"name": None}, "name", []),
        ({"name": ""}, "name", []),
        ({"name": " x"}, "name", ["printable"]),
        ({"name": "a/b"}, "name", ["slash"]),
        ({"name": "a\x00b"}, "name", ["printable"]),
        ({"name": "x" * 101}, "name", []),
        ({"name": "3"}, "name", ["'3' is a voice of the model"]),
        ({"name": "Alloy"}, "name", ["is a voice of the model"]),
        ({"name": "DEFAULT"}, "name", ["is a voice of the model"]),
        ({"consent": None}, "consent", []),
        ({"consent": "  "}, "consent", ["blank"]),
        ({"audio_sample": None}, "audio_sample", []),
        ({"audio_sample": as_uri(b"no sound")}, "audio_sample", ["cannot be read"]),
        ({"audio_sample": as_uri(RECORDING[:30])}, "audio_sample", ["cannot be read"]),
        ({"audio_sample": "file:///etc/passwd"}, "audio_sample", ["allowed-local-media-path"]),
        ({"audio_sample": as_uri(wav(1.5))}, "audio_sample", ["lasts 1.5 s", "--max-voice-seconds"]),
        ({"language": "english"}, "language", ["reads no 'language'"]),
        ({"ref_text": None}, None, ["ref_audio and ref_text"]),
        ({"type": "prompt"}, "type", []),
        ({"colour": "red"}, "colour", []),
    ],
)
def test_a_wrong_upload_is_refused(app: FastAPI, fields: dict[str, Any], param: str | None, words: list[str]) -> None:
    body = {name: value for name, value in {**UPLOAD, **fields}.items() if value is not None}
    strict = with_flags(app, "--max-voice-seconds", "1")
    refused(send(strict, "POST", VOICES, json=body), param, *words)
    assert send(strict, "GET", VOICES).json()["uploaded_voices"] == []


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_silence_is_no_voice(fresh_app: FastAPI, level: float) -> None:
    """Nor is a constant, which a muted microphone may give."""
    noise = 1e-4 * torch.randn(12_000, generator=torch.Generator().manual_seed(0))
    silence = as_uri(float_wav((noise + level, 24_000)))
    refused(send(fresh_app, "POST", VOICES, json={**UPLOAD, "audio_sample": silence}), "audio_sample", "is silent")
    body = {"input": TEXT, "ref_audio": silence, "ref_text": REF_TEXT}
    refused(send(fresh_app, "POST", SPEECH, json=body), "ref_audio", "is silent")
    assert send(fresh_app, "GET", VOICES).json()["uploaded_voices"] == []
    assert send(fresh_app, "POST", VOICES, json=UPLOAD).status_code == 200


@pytest.mark.parametrize("path", [SPEECH, VOICES])
def test_sounds_of_the_servers_network_are_not_fetched(app: FastAPI, host: str, path: str) -> None:
    field, body = {SPEECH: ("ref_audio", {"input": "a", "ref_text": "b"}), VOICES: ("audio_sample", UPLOAD)}[path]
    turns = {"input": "a", "context": [{"text": "b", "audio": host}]}

    async def main(client: openai.AsyncOpenAI) -> None:
        for address in (host, "http://169.254.169.254/latest", "http://[::1]/a.wav"):
            answer = await client._client.post(path, json={**body, field: address})
            refused(answer, field, "public address")
        refused(await client._client.post(SPEECH, json=turns), "context[0].audio", "public address")

    install(server_args(MODEL))  # Connections belong to an event loop.
    use(with_flags(app), main)


def test_names_and_numbers_are_bounded(app: FastAPI) -> None:
    few = with_flags(app, "--max-stored-voices", "2")
    assert send(few, "POST", VOICES, json=UPLOAD).status_code == 200
    refused(send(few, "POST", VOICES, json={**UPLOAD, "name": "NARRATOR"}), "name", "there is a voice")
    assert send(few, "POST", VOICES, json={**UPLOAD, "name": "b"}).status_code == 200
    refused(send(few, "POST", VOICES, json={**UPLOAD, "name": "c"}), None, "--max-stored-voices")
    small = with_flags(app, "--max-stored-voice-bytes", str(int(0.6 * 24000) * 4 - 1))
    refused(send(small, "POST", VOICES, json=UPLOAD), "audio_sample", "--max-stored-voice-bytes")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"speaker": "3"}, "speaker", ["reads no 'speaker'", "context, ref_audio, ref_text"]),
        ({"messages": []}, "messages", ["reads no 'messages'"]),
        ({"ref_audoi": "x"}, "ref_audoi", ["did you mean 'ref_audio'?"]),
        ({"respons_format": "wav"}, "respons_format", ["did you mean 'response_format'?"]),
        ({"ref_audio": as_uri(RECORDING)}, None, ["ref_audio and ref_text"]),
        ({"ref_text": "hello"}, None, ["ref_audio and ref_text"]),
        ({"ref_audio": as_uri(b""), "ref_text": "hello"}, "ref_audio", ["cannot be read"]),
        ({"ref_audio": 7}, "ref_audio", []),
        ({"context": [{"text": "hello"}]}, "context[0].audio", []),
        ({"context": "[}"}, "context", []),
        ({"context": [{"text": "a", "audio": "data:,", "voice": "nobody"}]}, "context[0].voice", ["unknown voice"]),
        ({"context": [{"text": "hello", "audio": "data:,"}]}, "context[0].audio", []),
        ({"context": [{"audio": as_uri(RECORDING)}]}, None, ["context[0] must be a dict with text and audio"]),
        ({"voice": "nobody"}, "voice", ["unknown voice 'nobody'"]),
    ],
)
def test_a_wrong_field_of_speech_is_named(
    app: FastAPI, fields: dict[str, Any], param: str | None, words: list[str]
) -> None:
    refused(speak(app, **fields), param, *words)


def test_a_voice_and_a_reference_exclude_each_other(fresh_app: FastAPI) -> None:
    send(fresh_app, "POST", VOICES, json=UPLOAD)
    answer = speak(fresh_app, voice="narrator", ref_audio=as_uri(RECORDING), ref_text="x")
    refused(answer, "voice", "leave out the voice")


def test_instructions_are_accepted_by_every_model(app: FastAPI, offline: Any) -> None:
    check(speak(app, instructions="Sing."), offline(ref_audio=None, ref_text=None))


def test_a_models_own_fields_reach_it(
    fresh_app: FastAPI, csm_llm: OmniLLM, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice_3, narrator = offline(speaker="3", ref_audio=None, ref_text=None), offline()
    seen: list[dict[str, Any]] = []

    class Recorder(CsmPromptProcessor):
        fields = (*CsmPromptProcessor.fields, "instructions", "language", "tempo")

        def process(self, given: Any) -> Any:
            seen.append(dict(given))
            return super().process({name: given[name] for name in CsmPromptProcessor.fields if name in given})

    processors = csm_llm.builder.prompt_processors
    recorder = copy.copy(processors[0])
    recorder.__class__ = Recorder
    monkeypatch.setitem(processors, 0, recorder)
    own = {"instructions": "Sing.", "language": "english", "tempo": {"beats": 3}}
    check(speak(fresh_app, voice="3", **own), voice_3)
    assert seen == [{"prompt": TEXT, "speaker": "3", **own}]

    send(fresh_app, "POST", VOICES, json={**UPLOAD, "language": "french"})
    check(speak(fresh_app, voice="narrator"), narrator)
    check(speak(fresh_app, voice="narrator", language="english"), narrator)
    assert [given["language"] for given in seen[1:]] == ["french", "french", "english"]
    refused(speak(fresh_app, tempi=3), "tempi", "did you mean 'tempo'?")


@pytest.mark.parametrize(
    ("fields", "language"),
    [({"language": "english"}, "english"), ({"lang_code": "en"}, "en"), ({"language": "EN", "lang_code": "en"}, "en")],
)
def test_a_language_reaches_a_model_that_has_a_choice(
    app: FastAPI, csm_llm: OmniLLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], language: str
) -> None:
    seen: list[dict[str, Any]] = []

    class Recorder(CsmPromptProcessor):
        fields = (*CsmPromptProcessor.fields, "language")

        def process(self, given: Any) -> Any:
            seen.append(dict(given))
            return super().process({"prompt": given["prompt"]})

    processors = csm_llm.builder.prompt_processors
    recorder = copy.copy(processors[0])
    recorder.__class__ = Recorder
    monkeypatch.setitem(processors, 0, recorder)
    answer = speak(app, **fields)
    assert answer.status_code == 200 and "warning" not in answer.headers
    assert seen == [{"prompt": TEXT, "language": language}]


def test_requests_survive_deletes(fresh_app: FastAPI, offline: Any) -> None:
    """A request that has started keeps its voice; of concurrent deletes one is right, and the name is free again."""

    async def main(client: openai.AsyncOpenAI) -> None:
        http_client = client._client
        for _ in range(3):
            assert (await http_client.post(VOICES, json=UPLOAD)).status_code == 200
            body = {"input": TEXT, "voice": "narrator", "response_format": "pcm"}
            with submissions(fresh_app.state.engine_client.llm) as submitted:
                speeches = [asyncio.create_task(http_client.post(SPEECH, json=body)) for _ in range(4)]
                assert await asyncio.to_thread(submitted.wait, 60)
            deletes = await asyncio.gather(*(http_client.delete(f"{VOICES}/narrator") for _ in range(4)))
            assert sorted(answer.status_code for answer in deletes) == [200, 404, 404, 404]
            spoken = 0
            for answer in await asyncio.gather(*speeches):
                if answer.status_code == 200:
                    check(answer, offline())
                    spoken += 1
                else:
                    refused(answer, "voice", "unknown voice")
            assert spoken

    use(fresh_app, main)


def test_a_batch_shares_its_voice(fresh_app: FastAPI, offline: Any) -> None:
    send(fresh_app, "POST", VOICES, json=UPLOAD)
    texts = [TEXT, "hello <|AUDIO|>", "two cats"]
    body = {"inputs": texts, "voice": "narrator", "response_format": "pcm"}
    answer = send(fresh_app, "POST", f"{SPEECH}/batch", json=body).json()
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    check(base64.b64decode(answer["data"][0]["audio"]), offline())
    check(base64.b64decode(answer["data"][2]["audio"]), offline(text="two cats"))
    assert answer["data"][1].keys() == {"index", "error"}
    assert "special tokens" in answer["data"][1]["error"]["message"]
