# SPDX-License-Identifier: Apache-2.0
"""Batches of speech, and forms, with a pipeline of known audio."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.entrypoints.fake_pipelines import is_idle, running, submissions
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, RATE
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.openai.test_speech import check_error, wave
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import to_pcm16

SPEECH = "/v1/audio/speech"
PATH = f"{SPEECH}/batch"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [AUDIO_STAGE], max_inflight=2, max_queued=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: AsyncOmniLLM) -> FakeServer:
    return FakeServer(llm, "--max-speech-inputs", "5")


def speak(server: FakeServer, *inputs: Any, **fields: Any) -> httpx.Response:
    return send(server.app, "POST", PATH, json={"inputs": list(inputs), "response_format": "pcm", **fields})


def items(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_the_files_are_in_the_order_of_the_texts(server: FakeServer) -> None:
    answer = speak(server, "3 pieces", "1 pieces", "2 pieces")
    assert answer.json().keys() == {"object", "model", "response_format", "data"}
    for index, (item, num_pieces) in enumerate(zip(items(answer), (3, 1, 2), strict=True)):
        assert base64.b64decode(item["audio"]) == to_pcm16(wave(num_pieces)).tobytes()
        assert (item["index"], item["sample_rate"], item["channels"]) == (index, RATE, 1)
        assert item["finish_reason"] == "stop" and item["usage"]["total_tokens"] == 0
    (item,) = items(speak(server, "2 pieces", response_format="flac", speed=2.0))
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(item["audio"])))
    assert len(samples) == pytest.approx(wave(2).size / 2, rel=0.05)


def test_an_error_of_one_text_is_its_own(server: FakeServer) -> None:
    first, second, third, fourth = items(speak(server, "1 pieces", "a failure", "silence", "noise"))
    assert base64.b64decode(first["audio"]) == to_pcm16(wave(1)).tobytes()
    for item, words in ((second, "failed in stage 0"), (third, "no audio"), (fourth, "broken audio")):
        assert item.keys() == {"index", "error"}
        assert item["error"]["code"] == 500 and words in item["error"]["message"]


def test_a_text_that_cannot_be_spoken_fails_alone(server: FakeServer) -> None:
    *wrong, good = items(speak(server, "", " \n", "x" * 4097, "1 pieces"))
    assert base64.b64decode(good["audio"]) == to_pcm16(wave(1)).tobytes()
    for index, words in enumerate(("at least 1 character", "blank", "at most 4096 characters")):
        error = wrong[index]["error"]
        assert (error["code"], error["type"], error["param"]) == (400, "BadRequestError", f"inputs[{index}]")
        assert error["message"].startswith(f"inputs[{index}] ") and words in error["message"], error


def test_texts_that_find_no_room_are_refused_and_the_others_spoken(server: FakeServer) -> None:
    results = items(speak(server, *["1 pieces"] * 5))
    refused = [item["error"] for item in results if "error" in item]
    assert [error["code"] for error in refused] == [429]
    assert all(base64.b64decode(item["audio"]) == to_pcm16(wave(1)).tobytes() for item in results if "audio" in item)


def test_a_client_abort_ends_all(server: FakeServer, llm: AsyncOmniLLM) -> None:
    async def main() -> None:
        with submissions(llm) as submitted:
            visit = AppRequest(server.app, PATH, {"inputs": ["endless", "endless"]})
            assert await asyncio.to_thread(submitted.wait, 60)
        await visit.disconnect()
        assert is_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"inputs": []}, "inputs", []),
        ({"inputs": "text"}, "inputs", []),
        ({"inputs": ["a", 5]}, "inputs[1]", ["must be a valid string"]),
        ({"inputs": ["a"] * 6}, "inputs", ["6 texts", "at most 5", "--max-speech-inputs"]),
        ({"input": "a"}, "input", ["did you mean 'inputs'?"]),
        ({"stream": True}, "stream", ["reads no 'stream'"]),
        ({"voice": "nobody"}, "voice", []),
        ({"ref_audio": "data:,"}, "ref_audio", ["beside OpenAI's fields it reads none"]),
        ({"speed": 9}, "speed", []),
        ({"sampling_params_list": [{"temperature": 1.0}]}, "sampling_params_list[0]", []),
    ],
)
def test_a_wrong_field_is_an_error_of_the_whole(
    server: FakeServer, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    check_error(speak(server, "1 pieces", **fields), 400, *words, param=param)


def test_a_model_that_imitates_no_voice_takes_no_uploads(server: FakeServer) -> None:
    upload = {"name": "a", "consent": "yes", "audio_sample": "data:,"}
    answer = send(server.app, "POST", "/v1/audio/voices", json=upload)
    check_error(answer, 400, "cannot imitate a voice", param="audio_sample")


def test_a_form_has_the_fields_of_json(server: FakeServer) -> None:
    form = {"input": "2 pieces", "response_format": "pcm", "speed": "1.0", "stream": "false", "voice": "alloy"}
    answer = send(server.app, "POST", SPEECH, files={name: (None, value) for name, value in form.items()})
    assert answer.content == to_pcm16(wave(2)).tobytes()
    wrong = send(server.app, "POST", SPEECH, data={**form, "sampling_params_list": '[{"temperature": 1}]'})
    check_error(wrong, 400, param="sampling_params_list[0]")
    check_error(send(server.app, "POST", SPEECH, data={**form, "speed": "fast"}), 400, param="speed")
    check_error(send(server.app, "POST", SPEECH, files={"input": ("a.txt", b"a")}), 400, param="input")
    check_error(send(server.app, "POST", SPEECH, content=b""), 415)


def test_every_reference_of_the_description_exists(server: FakeServer) -> None:
    description = send(server.app, "GET", "/openapi.json").json()
    names = {name.split('"')[0] for name in json.dumps(description).split('"#/components/schemas/')[1:]}
    assert {"SpeechTurn", "VoiceId", "CustomVoice"} <= names <= description["components"]["schemas"].keys()
    assert '"#/$defs/' not in json.dumps(description)


def test_a_long_result_does_not_change_others(server: FakeServer) -> None:
    """Pieces of one text never reach another."""
    results = items(speak(server, "40 pieces", "1 pieces", "40 pieces"))
    assert results[0]["audio"] == results[2]["audio"]
    assert np.frombuffer(base64.b64decode(results[0]["audio"]), "<i2").size == 40 * wave(1).size
