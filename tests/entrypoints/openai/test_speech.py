# SPDX-License-Identifier: Apache-2.0
"""The speech endpoint, with a pipeline of known audio: files, streams and errors."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import numpy as np
import openai
import pytest
import soundfile

from tests.entrypoints.fake_pipelines import STAGES, is_idle, record_events, running, submissions
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, NUM_SAMPLES, RATE, piece
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer, over_http
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.openai.test_audio_formats import decode
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import AUDIO_FORMATS, to_pcm16
from vllm_omni.entrypoints.openai.media_output import FINISH_REASON_HEADER
from vllm_omni.entrypoints.openai.speech import CHANNELS_HEADER, SAMPLE_RATE_HEADER, WARNING_HEADER
from vllm_omni.entrypoints.openai.speech_request import SpeechRequest
from vllm_omni.entrypoints.openai.voices import OPENAI_VOICES
from vllm_omni.errors import PipelineFullError
from vllm_omni.events import CompletedEvent

PATH = "/v1/audio/speech"
FORMATS = [name for name in AUDIO_FORMATS if name != "pcm16"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [AUDIO_STAGE]) as llm:
        yield llm


def wave(num_pieces: int) -> np.ndarray:
    return np.concatenate([piece(index).numpy() for index in range(num_pieces)])


def speak(server: FakeServer, text: str, **fields: Any) -> httpx.Response:
    return send(server.app, "POST", PATH, json={"input": text, **fields})


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def check_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert all(word in error["message"] for word in words), error
    if param is not None:
        assert error["param"] == param


def check_audio(response: httpx.Response, format: str, expected: np.ndarray) -> None:
    """`expected`: `[n]` or `[channels, n]`. The response's headers describe the file."""
    rate = int(response.headers["x-sample-rate"])
    assert rate == RATE
    assert int(response.headers["x-channels"]) == (1 if expected.ndim == 1 else len(expected))
    if format == "pcm":
        assert response.content == to_pcm16(expected).tobytes()
        return
    samples, decoded_rate = decode(response.content)
    assert samples.shape[:-1] == expected.shape[:-1]
    assert 0 <= samples.shape[-1] / decoded_rate - expected.shape[-1] / RATE <= 0.15
    if format in ("wav", "flac"):
        np.testing.assert_allclose(samples, expected, atol=1 / 32768)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", [{}, {"stream_format": "audio"}])
def test_a_stream_of_bytes(server: FakeServer, format: str, how: dict[str, Any]) -> None:
    response = speak(server, "3 pieces", response_format=format, **how)
    assert response.status_code == 200
    assert response.headers["content-type"] == AUDIO_FORMATS[format]
    assert "content-length" not in response.headers
    check_audio(response, format, wave(3))


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_file_has_its_length(server: FakeServer, format: str) -> None:
    response = speak(server, "3 pieces", response_format=format, stream=False)
    assert response.headers["content-type"] == AUDIO_FORMATS[format]
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers["x-finish-reason"] == "stop"
    check_audio(response, format, wave(3))
    if format in ("wav", "flac"):
        with soundfile.SoundFile(io.BytesIO(response.content)) as file:
            assert file.frames == wave(3).shape[-1]


@pytest.mark.parametrize("format", FORMATS)
def test_stereo_stays_stereo(server: FakeServer, format: str) -> None:
    check_audio(speak(server, "stereo", response_format=format), format, np.stack([piece(0), piece(1)]))


def test_the_default_is_mp3(server: FakeServer) -> None:
    assert speak(server, "1 pieces").headers["content-type"] == "audio/mpeg"


def test_streamed_speech_is_not_kept(server: FakeServer, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_events(llm, monkeypatch)
    assert speak(server, "3 pieces", response_format="pcm").content == to_pcm16(wave(3)).tobytes()
    assert isinstance(events[-1], CompletedEvent)
    assert events[-1].outputs[0].multimodal_output["audio"].shape == (0,)


def test_a_stream_of_events(server: FakeServer) -> None:
    response = speak(server, "3 pieces", response_format="pcm", stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["x-sample-rate"], response.headers["x-channels"]) == (str(RATE), "1")
    *deltas, done = sse(response)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == to_pcm16(wave(3)).tobytes()
    assert done == {
        "type": "speech.audio.done",
        "finish_reason": "stop",
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},  # a function has no tokens
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_audio_is_sent_while_more_is_made(
    server: FakeServer, llm: AsyncOmniLLM, format: str, stream_format: str
) -> None:
    async def main() -> None:
        body = {"input": "endless", "response_format": format, "stream_format": stream_format}
        visit = AppRequest(server.app, PATH, body)
        await visit.first_chunk()
        assert visit.status == 200 and not is_idle(llm)
        await visit.disconnect()
        assert is_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"speed": 4.0}])
def test_a_client_abort_frees_everything(server: FakeServer, llm: AsyncOmniLLM, fields: dict[str, Any]) -> None:
    async def main() -> None:
        with submissions(llm) as submitted:
            visit = AppRequest(server.app, PATH, {"input": "endless", **fields})
            assert await asyncio.to_thread(submitted.wait, 60)
        await visit.disconnect()
        assert is_idle(llm)

    asyncio.run(main())
    assert speak(server, "1 pieces").status_code == 200


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_speed(server: FakeServer, speed: float) -> None:
    response = speak(server, "4 pieces", response_format="wav", speed=speed)
    samples, rate = decode(response.content)
    assert len(samples) / rate == pytest.approx(4 * NUM_SAMPLES / RATE / speed, rel=0.05)


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}])
@pytest.mark.parametrize(
    ("text", "words"), [("silence", "no audio"), ("noise", "broken audio"), ("a failure", "failed in stage 0")]
)
def test_an_error_before_the_first_audio_has_an_http_status(
    server: FakeServer, fields: dict[str, Any], text: str, words: str
) -> None:
    check_error(speak(server, text, **fields), 500, words)


@pytest.mark.parametrize("format", FORMATS)
def test_a_failed_stream_of_bytes_is_cut_off(server: FakeServer, format: str) -> None:
    """A client cannot take a part for the whole file."""
    with over_http(server.app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request: dict[str, Any] = {"model": "fake", "voice": "alloy", "input": "a late failure"}
        request["response_format"] = format
        with pytest.raises(openai.APIConnectionError):
            client.audio.speech.create(**request)
        with client.audio.speech.with_streaming_response.create(**request) as response:
            assert response.status_code == 200
            with pytest.raises(httpx2.RemoteProtocolError, match="incomplete chunked read"):
                response.read()


def test_a_failed_stream_of_events_ends_with_an_error(server: FakeServer) -> None:
    *deltas, end = sse(speak(server, "a late failure", stream_format="sse"))
    assert deltas and all(delta["type"] == "speech.audio.delta" for delta in deltas)
    assert end["error"]["code"] == 500 and "failed in stage 0" in end["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n\t"}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": None}, "input"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.5}, "speed"),
        ({"response_format": "ogg"}, "response_format"),
        ({"stream_format": "mp3"}, "stream_format"),
        ({"voice": "nobody"}, "voice"),
        ({"stream": False, "stream_format": "sse"}, "stream"),
        ({"voice": {"id": "nobody"}}, "voice"),
        ({"voice": {"name": "alloy"}}, "voice.id"),
        ({"colour": "red"}, "colour"),
        ({"sample_rate": 7999}, "sample_rate"),
        ({"sample_rate": 48001}, "sample_rate"),
        ({"sample_rate": "high"}, "sample_rate"),
        ({"volume_multiplier": -0.1}, "volume_multiplier"),
        ({"volume_multiplier": 10.1}, "volume_multiplier"),
        ({"language": "english", "lang_code": "fr"}, "lang_code"),
        ({"language": "x" * 101}, "language"),
        ({"sampling_params_list": [None, None]}, "sampling_params_list"),
        ({"sampling_params_list": [{"temperature": 1.0}]}, "sampling_params_list[0]"),
    ],
)
def test_a_wrong_field_is_named(server: FakeServer, fields: dict[str, Any], param: str) -> None:
    check_error(speak(server, "1 pieces", **fields), 400, param=param)


def test_null_is_absent(server: FakeServer) -> None:
    nulls = dict.fromkeys(name for name in SpeechRequest.model_fields if name != "input")
    assert speak(server, "1 pieces", **nulls).content == speak(server, "1 pieces").content


@pytest.mark.parametrize("voice", ["default", {"id": "Default"}, None, "alloy"])
def test_a_model_without_voices_has_a_default_one(server: FakeServer, voice: Any) -> None:
    """OpenAI's client requires a voice."""
    assert speak(server, "1 pieces", voice=voice).status_code == 200
    assert send(server.app, "GET", "/v1/audio/models").json() == {"models": [{"id": "fake"}]}
    expected = {"voices": [], "voice_map": dict.fromkeys(OPENAI_VOICES, "default"), "uploaded_voices": []}
    assert send(server.app, "GET", "/v1/audio/voices").json() == expected


def test_instructions_are_accepted_and_unused_by_other_models(server: FakeServer) -> None:
    """OpenAI's examples send them to any model."""
    sounds = [
        speak(server, "2 pieces", response_format="pcm", **how).content for how in ({}, {"instructions": "Sing."})
    ]
    assert sounds[0] == sounds[1] == to_pcm16(wave(2)).tobytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", [{}, {"stream": True}, {"stream": False}, {"stream_format": "sse"}])
def test_a_file_has_the_sample_rate_that_is_chosen(server: FakeServer, format: str, how: dict[str, Any]) -> None:
    response = speak(server, "3 pieces", response_format=format, sample_rate=22050, **how)
    rate = 24000 if format == "opus" else 22050
    assert response.status_code == 200 and int(response.headers["x-sample-rate"]) == rate
    data = response.content
    if how.get("stream_format") == "sse":
        data = b"".join(base64.b64decode(event.get("audio", "")) for event in sse(response))
    samples, decoded_rate = (np.frombuffer(data, "<i2"), rate) if format == "pcm" else decode(data)
    assert decoded_rate == (48000 if format == "opus" else rate)  # Opus is always decoded at 48 kHz.
    assert 0 <= len(samples) / decoded_rate - wave(3).size / RATE <= 0.15


def test_a_streamed_file_of_another_rate_and_volume_is_the_whole_one(server: FakeServer) -> None:
    fields = {"response_format": "pcm", "sample_rate": 44100, "volume_multiplier": 2.5, "speed": 1.5}
    streamed, whole = (speak(server, "5 pieces", stream=stream, **fields).content for stream in (True, False))
    assert streamed == whole and len(whole) > 100_000
    (item,) = send(server.app, "POST", f"{PATH}/batch", json={"inputs": ["5 pieces"], **fields}).json()["data"]
    assert base64.b64decode(item["audio"]) == whole and item["sample_rate"] == 44100


def test_the_volume(server: FakeServer) -> None:
    loud = speak(server, "2 pieces", response_format="pcm", volume_multiplier=5).content
    assert loud == to_pcm16(np.clip(wave(2) * np.float32(5), -1, 1)).tobytes()
    assert speak(server, "2 pieces", response_format="pcm", volume_multiplier=1).content == to_pcm16(wave(2)).tobytes()


FOREIGN: dict[str, Any] = {
    "lang_code": "a", "language": "en", "normalization_options": {"normalize": False}, "backend": "openai",
    "user": "u", "task_type": "CustomVoice",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("how", [{}, {"stream": False}, {"stream_format": "sse"}])
def test_a_field_of_another_server_without_effect_is_named_in_a_warning(
    server: FakeServer, name: str, how: dict[str, Any]
) -> None:
    fields = {"response_format": "pcm", **how}
    answer, expected = (speak(server, "1 pieces", **fields, **more) for more in ({name: FOREIGN[name]}, {}))
    assert answer.status_code == 200 and answer.content == expected.content
    assert answer.headers["warning"].startswith(f'299 - "field {name} is ignored: ')
    assert "warning" not in expected.headers


def test_all_ignored_fields_are_in_one_warning(server: FakeServer) -> None:
    fields = {**FOREIGN, "lang_code": "en"}
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    for answer in (
        speak(server, "1 pieces", **fields),
        send(server.app, "POST", PATH, data={"input": "1 pieces", **form}),
        send(server.app, "POST", f"{PATH}/batch", json={"inputs": ["1 pieces"], **fields}),
    ):
        warnings = answer.headers["warning"].split(", ")
        assert sorted(warning.split()[3] for warning in warnings) == sorted(FOREIGN)
        assert all(warning.startswith('299 - "field ') and warning.endswith('"') for warning in warnings)
    refused = speak(server, "1 pieces", **fields, colour="red")
    check_error(refused, 400, "reads no 'colour'", param="colour")


def test_stream_true_is_the_default(server: FakeServer) -> None:
    answer, expected = (speak(server, "2 pieces", response_format="pcm", **how) for how in ({"stream": True}, {}))
    assert answer.content == expected.content and "content-length" not in answer.headers
    assert answer.headers["content-type"] == "audio/pcm" and "warning" not in answer.headers


def test_models_by_name(server: FakeServer) -> None:
    assert speak(server, "1 pieces", model="fake").status_code == 200
    for name in ("tts-2", "whisper-1", "dall-e-3"):
        check_error(speak(server, "1 pieces", model=name), 404, name, "this server has fake")


@pytest.mark.parametrize("name", ["tts-1", "tts-1-hd", "gpt-4o-mini-tts"])
def test_openais_names_of_models_mean_the_served_one(server: FakeServer, llm: AsyncOmniLLM, name: str) -> None:
    expected = to_pcm16(wave(1)).tobytes()
    assert speak(server, "1 pieces", model=name, response_format="pcm").content == expected
    assert [model["id"] for model in send(server.app, "GET", "/v1/models").json()["data"]] == ["fake"]
    assert send(server.app, "GET", f"/v1/models/{name}").status_code == 404
    strict = FakeServer(llm, "--no-model-aliases")
    check_error(speak(strict, "1 pieces", model=name), 404, name, "this server has fake")
    named = FakeServer(llm, "--no-model-aliases", "--served-model-name", "other", name)
    assert speak(named, "1 pieces", model=name).status_code == 200


def test_the_error_of_a_model_without_audio_lists_its_outputs(tmp_path: Any) -> None:
    with running(AsyncOmniLLM, tmp_path, STAGES[:1]) as llm:
        server = FakeServer(llm)
        check_error(speak(server, "hello"), 400, "cannot output audio", "text", param="model")
        assert send(server.app, "GET", "/v1/audio/models").json() == {"models": []}


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (200, {"json": {"input": "1 piece"}}),
        (400, {"content": b"{", "headers": {"content-type": "application/json"}}),
        (400, {"json": {"input": ""}}),
        (401, {"json": {}, "headers": {"authorization": "Bearer wrong"}}),
        (404, {"url": "/v1/nowhere"}),
        (405, {"method": "PUT"}),
        (413, {"content": b"x" * 2000}),
        (429, {"url": "/v1/full"}),
        (500, {"json": {"input": "a failure", "stream": False}}),
        (500, {"url": "/v1/fault"}),
    ],
)
def test_pages_of_other_sites_can_read_every_answer(llm: AsyncOmniLLM, status: int, request_: dict[str, Any]) -> None:
    server = FakeServer(llm, '--allowed-origins=["*"]', "--api-key=key", "--max-request-bytes=1000")

    @server.app.post("/v1/fault")
    async def fault() -> None:
        raise RuntimeError("unknown")

    @server.app.post("/v1/full")
    async def full() -> None:
        raise PipelineFullError("full", 2.0)

    request = dict(request_)
    headers = {"origin": "https://page.example", "authorization": "Bearer key", **request.pop("headers", {})}
    answer = send(server.app, request.pop("method", "POST"), request.pop("url", PATH), headers=headers, **request)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    headers = {SAMPLE_RATE_HEADER, CHANNELS_HEADER, FINISH_REASON_HEADER, WARNING_HEADER, "Retry-After"}
    assert headers <= {*exposed}
