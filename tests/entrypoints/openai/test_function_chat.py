# SPDX-License-Identifier: Apache-2.0
"""Chat with a pipeline of functions that reads a picture aloud: text and speech of the last message's image."""

import base64
import io
import json
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.entrypoints.fake_pipelines import is_idle, running
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.media_apps import png
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import LOOKING, NUM_SAMPLES, RATE, SPEAKING, level
from vllm_omni import AsyncOmniLLM

STAGES = (LOOKING, SPEAKING | {"accepts": "text"})
EDGES = [{"from": 0, "to": 1, "unit": "sentences"}]
TEXT = "It is 40 by 30. It begins with [255, 0, 0]. "
URI = "data:image/png;base64," + base64.b64encode(png(40, 30)).decode()
PICTURE = {"type": "image_url", "image_url": {"url": URI}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), STAGES, edges=EDGES) as llm:
        yield FakeServer(llm)


def chat(server: FakeServer, *content: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content or (PICTURE,))}]
    return send(server.app, "POST", "/v1/chat/completions", json={"messages": messages, **fields})


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *lines, end = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_is_the_text(server: FakeServer) -> None:
    answer = chat(server, PICTURE, {"type": "text", "text": "Aloud."}).json()

    (choice,) = answer["choices"]
    assert (answer["object"], choice["finish_reason"]) == ("chat.completion", "stop")
    assert (choice["message"]["content"], choice["message"]["audio"]) == (TEXT + "Aloud.", None)
    assert answer["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(("modalities", "content"), [(["text", "audio"], TEXT), (["audio"], None)])
def test_an_answer_is_spoken(server: FakeServer, modalities: list[str], content: str | None) -> None:
    answer = chat(server, modalities=modalities, audio={"voice": "bob", "format": "wav"}).json()

    message = answer["choices"][0]["message"]
    assert (message["content"], message["audio"]["transcript"]) == (content, TEXT)
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, len(TEXT) * NUM_SAMPLES)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    np.testing.assert_allclose(np.abs(samples), level("Bob"), atol=1e-3)


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"], ["text"]])
def test_a_stream(server: FakeServer, modalities: list[str]) -> None:
    streamed = chat(server, modalities=modalities, stream=True, stream_options={"include_usage": True})
    *chunks, last = chunks_of(streamed)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 0)
    written = "".join(delta.get("content") or "" for delta in deltas)
    assert written == (TEXT if "text" in modalities else "")
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    data = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    assert len(data) == (2 * len(TEXT) * NUM_SAMPLES if "audio" in modalities else 0)
    assert "".join(part.get("transcript", "") for part in audio) == (TEXT if audio else "")


def test_speech_comes_sentence_by_sentence(server: FakeServer) -> None:
    """The samples of the second sentence have the other sign."""
    chunks = chunks_of(chat(server, modalities=["audio"], stream=True))
    audio = [chunk["choices"][0]["delta"].get("audio", {}).get("data", "") for chunk in chunks]
    samples = np.frombuffer(b"".join(map(base64.b64decode, audio)), "<i2")
    (turn,) = np.flatnonzero(np.diff(np.sign(samples))) + 1
    assert turn == len("It is 40 by 30. ") * NUM_SAMPLES


def test_only_the_last_message_is_read(server: FakeServer) -> None:
    other = {"type": "image_url", "image_url": {"url": URI.replace("png", "x-png", 1)}}
    earlier = [{"role": "user", "content": [other, other]}, {"role": "assistant", "content": "..."}]
    messages = [{"role": "system", "content": "Be brief."}, *earlier, {"role": "user", "content": [PICTURE]}]
    answer = send(server.app, "POST", "/v1/chat/completions", json={"messages": messages}).json()
    assert answer["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ([{"type": "text", "text": "Hello"}], {}, "one part of type image_url, not 0"),
        ([PICTURE, PICTURE], {}, "one part of type image_url, not 2"),
        ([PICTURE, PICTURE | {"name": "mask"}], {}, "and no mask"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], {}, "image"),
        ([PICTURE, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], {}, "and no audio"),
        ([PICTURE], {"n": 2}, "n must be 1"),
        ([PICTURE], {"modalities": ["video"]}, "cannot output 'video'"),
        ([PICTURE], {"modalities": ["text", "audio"], "audio": {"voice": "eve"}}, "unknown voice 'eve'"),
        ([PICTURE], {"logprobs": True}, "logprobs is for models that write"),
        ([PICTURE], {"sampling_params_list": [None, {"tone": 1}]}, "unknown parameter 'tone'"),
        ([PICTURE], {"extra_body": {"height": 8}}, "settings of a diffusion model"),
    ],
)  # fmt: skip
def test_what_is_refused(server: FakeServer, content: list[Any], fields: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        response = chat(server, *content, stream=stream, **fields)
        assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


def test_an_error_of_the_function(server: FakeServer) -> None:
    failing = (PICTURE, {"type": "text", "text": "fail"})
    response = chat(server, *failing)
    assert response.status_code == 500 and "failed in stage 0" in response.json()["error"]["message"]
    *chunks, error = chunks_of(chat(server, *failing, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "It is 40 by 30. "
    assert "failed in stage 0" in error["error"]["message"]
    assert is_idle(server.client.llm)


def test_the_description(server: FakeServer) -> None:
    known = send(server.app, "GET", "/v1/pipeline").json()
    assert (known["inputs"], known["outputs"]) == (["text", "image"], ["text", "audio"])
    assert known["endpoints"] == ["/v1/chat/completions", "/v1/audio/speech", "/v1/audio/speech/stream"]


def test_a_text_is_spoken_without_a_picture(server: FakeServer) -> None:
    response = send(server.app, "POST", "/v1/audio/speech", json={"input": "Hello", "response_format": "pcm"})
    assert len(response.content) == 2 * len("Hello") * NUM_SAMPLES
