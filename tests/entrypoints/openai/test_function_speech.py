# SPDX-License-Identifier: Apache-2.0
"""Speech from a stage that is a class: its voices and parameters in requests."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import NUM_SAMPLES, SPEAKING, WRITING_STAGE, level
from vllm_omni import AsyncOmniLLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [WRITING_STAGE, SPEAKING]) as llm:
        yield FakeServer(llm)


def speak(server: FakeServer, **fields: Any) -> httpx.Response:
    return send(server.app, "POST", "/v1/audio/speech", json={"input": "Hello", "response_format": "pcm", **fields})


@pytest.mark.parametrize(
    ("fields", "voice", "speed"),
    [
        ({}, "Ann", 1),
        ({"voice": "bob"}, "Bob", 1),
        ({"voice": "ash", "speed": 2}, "Bob", 2),  # OpenAI's names are spread over the stage's.
        ({"voice": "default", "language": "en", "pitch": 3}, "Ann", 1),
        ({"sampling_params_list": [None, {"voice": "Bob", "speed": 0.5}]}, "Bob", 0.5),
    ],
)
def test_a_request_sets_parameters(server: FakeServer, fields: dict[str, Any], voice: str, speed: float) -> None:
    response = speak(server, **fields)
    assert response.status_code == 200, response.text
    samples = np.frombuffer(response.content, "<i2") / 32768
    assert len(samples) == 5 * NUM_SAMPLES / speed, "the stage alone changes the speed"
    np.testing.assert_allclose(samples, level(voice), atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"voice": "eve"}, ["unknown voice 'eve'", "ann, bob"]),
        ({"speed": 3}, ["speed: Expected `float` <= 2.0", "stage 'voice'"]),
        ({"pitch": "high"}, ["pitch: Expected `int`"]),
        ({"tone": 1}, ["reads no 'tone'"]),
        ({"sampling_params_list": [None, {"tone": 1}]}, ["unknown parameter 'tone' for stage 'voice'"]),
        ({"sampling_params_list": [{"tone": 1}, None]}, ["stage 'writer' does not sample"]),
    ],
)
def test_wrong_parameters_are_the_clients_error(server: FakeServer, fields: dict[str, Any], words: list[str]) -> None:
    response = speak(server, **fields)
    assert response.status_code == 400
    assert all(word in response.json()["error"]["message"] for word in words), response.text


def test_a_priority_reaches_the_pipeline(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, given = server.client.llm.generate, []

    def record(*args: Any, **options: Any) -> Any:
        given.append(options["priority"])
        return generate(*args, **options)

    monkeypatch.setattr(server.client.llm, "generate", record)
    for fields in ({}, {"priority": -3}):
        assert speak(server, **fields).status_code == 200
    assert given == [0, -3]
    assert speak(server, priority=2**63).status_code == 400


def test_voices_are_listed(server: FakeServer) -> None:
    voices = send(server.app, "GET", "/v1/audio/voices").json()
    assert voices["voices"] == [{"id": "ann", "name": "ann"}, {"id": "bob", "name": "bob"}]
    assert voices["voice_map"]["alloy"] == "ann"


def test_functions_hold_no_chat(server: FakeServer) -> None:
    described = send(server.app, "GET", "/v1/pipeline").json()
    assert described["endpoints"] == ["/v1/audio/speech", "/v1/audio/speech/stream"]
    for stream in (False, True):
        chat = {"messages": [{"role": "user", "content": "Hello"}], "stream": stream}
        refused = send(server.app, "POST", "/v1/chat/completions", json=chat)
        assert refused.status_code == 400 and "/v1/audio/speech" in refused.json()["error"]["message"], refused.text
    assert speak(server).status_code == 200
