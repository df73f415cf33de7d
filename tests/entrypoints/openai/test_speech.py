# SPDX-License-Identifier: Apache-2.0
"""The speech endpoint, with a pipeline whose sound is known: what is sent, how, and what happens when it fails."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.entrypoints.faces import STAGES, is_idle, record_events, running
from tests.entrypoints.openai.fake_server import FakeServer, Visit
from tests.entrypoints.openai.singing import NUM_SAMPLES, RATE, SINGER, piece
from tests.entrypoints.openai.small_apps import ask
from tests.entrypoints.openai.test_audio_formats import decode
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import AUDIO_FORMATS, encode_audio, to_pcm16
from vllm_omni.events import CompletedEvent

PATH = "/v1/audio/speech"
FORMATS = [name for name in AUDIO_FORMATS if name != "pcm16"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [SINGER]) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: AsyncOmniLLM) -> FakeServer:
    return FakeServer(llm)


def wave(num_pieces: int) -> np.ndarray:
    return np.concatenate([piece(index).numpy() for index in range(num_pieces)])


def speak(server: FakeServer, text: str, **fields: Any) -> httpx.Response:
    return ask(server.app, "POST", PATH, json={"input": text, **fields})


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def check_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert all(word in error["message"] for word in words), error
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_file(server: FakeServer, format: str) -> None:
    response = speak(server, "3 pieces", response_format=format)
    assert response.status_code == 200
    assert response.headers["content-type"] == AUDIO_FORMATS[format]
    assert int(response.headers["content-length"]) == len(response.content)
    expected = encode_audio(wave(3), format, RATE)
    if format == "opus":  # Its files have a random number each.
        assert np.array_equal(decode(response.content)[0], decode(expected)[0])
    else:
        assert response.content == expected


@pytest.mark.parametrize("stream", [False, True])
def test_several_channels_become_one(server: FakeServer, stream: bool) -> None:
    response = speak(server, "stereo", response_format="pcm", stream=stream)
    assert response.content == to_pcm16((piece(0) + piece(1)).numpy() / 2).tobytes()


def test_the_default_is_mp3(server: FakeServer) -> None:
    assert speak(server, "1 pieces").headers["content-type"] == "audio/mpeg"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", [{"stream": True}, {"stream_format": "audio"}])
def test_a_stream_of_bytes(server: FakeServer, format: str, how: dict[str, Any]) -> None:
    response = speak(server, "3 pieces", response_format=format, **how)
    assert response.status_code == 200
    assert response.headers["content-type"] == AUDIO_FORMATS[format]
    assert "content-length" not in response.headers
    if format == "pcm":
        assert response.content == to_pcm16(wave(3)).tobytes()
    else:
        samples, rate = decode(response.content)
        assert 0 <= len(samples) / rate - 3 * NUM_SAMPLES / RATE <= 0.15


def test_a_stream_is_not_held_until_its_end(
    server: FakeServer, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_events(llm, monkeypatch)
    for stream, num_samples in ((True, 0), (False, 3 * NUM_SAMPLES)):
        assert speak(server, "3 pieces", response_format="pcm", stream=stream).content == to_pcm16(wave(3)).tobytes()
        assert isinstance(events[-1], CompletedEvent)
        assert len(events[-1].outputs[0].multimodal_output["audio"]) == num_samples


def test_stream_false_is_a_whole_file_whatever_the_stream_format(server: FakeServer) -> None:
    response = speak(server, "2 pieces", response_format="wav", stream=False, stream_format="audio")
    assert response.content == encode_audio(wave(2), "wav", RATE)


def test_a_stream_of_events(server: FakeServer) -> None:
    response = speak(server, "3 pieces", response_format="pcm", stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = sse(response)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == to_pcm16(wave(3)).tobytes()
    assert done == {
        "type": "speech.audio.done",
        "finish_reason": "stop",
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},  # a function has no tokens
    }


def test_bytes_come_while_more_is_being_made(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def main() -> None:
        visit = Visit(server.app, PATH, {"input": "endless", "stream": True, "response_format": "opus"})
        await visit.first_chunk()
        assert visit.status == 200 and not is_idle(llm)
        await visit.leave()
        assert is_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"stream": True, "speed": 4.0}])
def test_who_leaves_leaves_nothing_behind(server: FakeServer, llm: AsyncOmniLLM, fields: dict[str, Any]) -> None:
    async def main() -> None:
        visit = Visit(server.app, PATH, {"input": "endless", **fields})
        while is_idle(llm):
            await asyncio.sleep(0)
        await visit.leave()
        assert is_idle(llm)

    asyncio.run(main())
    assert speak(server, "1 pieces").status_code == 200


@pytest.mark.parametrize("speed", [0.5, 2.0])
@pytest.mark.parametrize("stream", [False, True])
def test_speed(server: FakeServer, speed: float, stream: bool) -> None:
    response = speak(server, "4 pieces", response_format="wav", speed=speed, stream=stream)
    samples, rate = decode(response.content)
    assert len(samples) / rate == pytest.approx(4 * NUM_SAMPLES / RATE / speed, rel=0.05)


STREAMS = [{}, {"stream": True}, {"stream_format": "sse"}]


@pytest.mark.parametrize("fields", STREAMS)
@pytest.mark.parametrize(
    ("text", "says"), [("silence", "no sound"), ("noise", "broken audio"), ("a failure", "failed in stage 0")]
)
def test_what_fails_before_there_is_any_sound_has_a_status(
    server: FakeServer, fields: dict[str, Any], text: str, says: str
) -> None:
    check_error(speak(server, text, **fields), 500, says)


def test_a_stream_of_bytes_that_fails_is_cut_off(server: FakeServer) -> None:
    """A web server then closes the connection, and no client can take what it got for the whole."""

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:
            await client.post(PATH, json={"input": "a late failure", "stream": True})

    with pytest.raises(Exception, match=r"response already started|failed"):
        asyncio.run(main())


def test_a_stream_of_events_that_fails_says_so(server: FakeServer) -> None:
    *deltas, end = sse(speak(server, "a late failure", stream_format="sse"))
    assert deltas and all(delta["type"] == "speech.audio.delta" for delta in deltas)
    assert end["error"]["code"] == 500 and "failed in stage 0" in end["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "body.input"),
        ({"input": " \n\t"}, "body.input"),
        ({"input": "x" * 4097}, "body.input"),
        ({"input": None}, "body.input"),
        ({"speed": 0.2}, "body.speed"),
        ({"speed": 4.5}, "body.speed"),
        ({"response_format": "ogg"}, "body.response_format"),
        ({"stream_format": "mp3"}, "body.stream_format"),
        ({"stream": False, "stream_format": "sse"}, "stream"),
        ({"voice": "alloy"}, "voice"),
        ({"voice": {"id": "alloy"}}, "voice"),
        ({"voice": {"name": "alloy"}}, "body.voice"),
        ({"instructions": "kindly"}, "instructions"),
        ({"colour": "red"}, "body.colour"),
        ({"sampling_params_list": [None, None]}, "sampling_params_list"),
        ({"sampling_params_list": [{"temperature": 1.0}]}, "sampling_params_list[0]"),
    ],
)
def test_a_wrong_field_is_named(server: FakeServer, fields: dict[str, Any], param: str) -> None:
    check_error(speak(server, "1 pieces", **fields), 400, param=param)


@pytest.mark.parametrize("voice", ["default", {"id": "Default"}, None])
def test_a_model_without_voices_has_a_default_one(server: FakeServer, voice: Any) -> None:
    """OpenAI's client must say some voice."""
    assert speak(server, "1 pieces", voice=voice).status_code == 200
    assert ask(server.app, "GET", "/v1/audio/voices").json() == {"voices": []}


def test_models_by_name(server: FakeServer) -> None:
    assert speak(server, "1 pieces", model="fake").status_code == 200
    check_error(speak(server, "1 pieces", model="tts-1"), 404, "tts-1")


def test_a_model_without_sound_says_what_it_outputs(tmp_path: Any) -> None:
    with running(AsyncOmniLLM, tmp_path, STAGES[:1]) as llm:
        check_error(speak(FakeServer(llm), "hello"), 400, "cannot speak", "text", param="model")
