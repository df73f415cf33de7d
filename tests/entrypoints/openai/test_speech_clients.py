# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client with the speech endpoint of a real server."""

import base64
import json
from typing import Any

import openai
import pytest

from tests.entrypoints.openai.test_audio_formats import decode
from tests.servers import RunningServer

GROUP = "server"
pytestmark = pytest.mark.slow

FORMATS = ["mp3", "opus", "aac", "flac", "wav", "pcm"]


def arguments(server: RunningServer, **others: Any) -> dict[str, Any]:
    """The length of the speech: two seconds, or less if the talker stops."""
    talker = {"temperature": 0.9, "max_tokens": 25, "seed": 7}
    extra_body = {"sampling_params_list": [None, talker, None]}
    return {"model": server.model, "voice": "ethan", "input": "Hello.", "extra_body": extra_body, **others}


@pytest.fixture(scope="module")
def expected_s(omni_server: RunningServer) -> float:
    """Seconds of the speech."""
    speech = omni_server.openai().audio.speech.create(**arguments(omni_server, response_format="pcm"))
    return num_seconds(speech.content, "pcm")


def num_seconds(data: bytes, format: str) -> float:
    if format == "pcm":
        return len(data) / 2 / 24000
    samples, rate = decode(data)
    return len(samples) / rate


@pytest.mark.parametrize("format", FORMATS)
def test_a_file(omni_server: RunningServer, format: str, expected_s: float) -> None:
    speech = omni_server.openai().audio.speech.create(**arguments(omni_server, response_format=format))
    assert expected_s > 0
    assert expected_s - 0.001 < num_seconds(speech.content, format) < expected_s + 0.15


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream(omni_server: RunningServer, format: str, expected_s: float) -> None:
    request = arguments(omni_server, response_format=format, voice={"id": "Ethan"})
    with omni_server.openai().audio.speech.with_streaming_response.create(**request) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert response.headers["x-sample-rate"] == "24000" and response.headers["x-channels"] == "1"
        data = b"".join(response.iter_bytes())
    assert expected_s - 0.001 < num_seconds(data, format) < expected_s + 0.15


def test_events(omni_server: RunningServer, expected_s: float) -> None:
    request = arguments(omni_server, response_format="pcm", stream_format="sse")
    with omni_server.openai().audio.speech.with_streaming_response.create(**request) as response:
        *deltas, done = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert done["type"] == "speech.audio.done"
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert num_seconds(data, "pcm") == expected_s


def test_an_unknown_voice(omni_server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="ethan") as raised:
        omni_server.openai().audio.speech.create(**arguments(omni_server, voice="nobody"))
    assert raised.value.param == "voice"
