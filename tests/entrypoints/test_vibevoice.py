# SPDX-License-Identifier: Apache-2.0
"""VibeVoice, from prompts to sound: offline, streamed, aborted, and over HTTP."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async, start
from tests.entrypoints.openai.media_apps import app_of, send
from tests.entrypoints.speech_streams import check_left_stream
from tests.entrypoints.wav_files import as_uri, float_wav
from tests.model_executor.models.vibevoice.prompts import PROMPTS
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.testing.oracles.vibevoice import Speech, VibeVoiceReference

pytestmark = pytest.mark.slow
MAX_FRAMES = 40
SEED = 3


@pytest.fixture(scope="module")
def llm(tiny_vibevoice: Path) -> Iterator[OmniLLM]:
    greedy = {"default_sampling_params": {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1, "seed": SEED}}
    with start(tiny_vibevoice, max_model_len=512, stage_overrides={"language_model": greedy}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_vibevoice: Path) -> dict[str, Speech]:
    reference = VibeVoiceReference(tiny_vibevoice)
    return {name: reference.speak(prompt, MAX_FRAMES, SEED) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def app(llm: OmniLLM, tiny_vibevoice: Path) -> FastAPI:
    return app_of(OmniEngineClient(as_async(llm)), tiny_vibevoice)


def test_prompts_of_every_kind_at_once(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    outputs = llm.generate(list(PROMPTS.values()), use_tqdm=False)
    for output, speech in zip(outputs, expected.values(), strict=True):
        torch.testing.assert_close(output.multimodal_output["audio"], speech.audio, rtol=0, atol=1e-4)
    assert outputs[0].sample_rate == 24000


def test_a_stream_is_the_whole_and_others_are_aborted(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    """Leaving the loop when some have ended aborts the rest; the next requests are not affected."""
    check_left_stream(llm, PROMPTS, {name: speech.audio for name, speech in expected.items()})
    test_prompts_of_every_kind_at_once(llm, expected)


def test_an_end_at_once_is_no_sound(llm: OmniLLM) -> None:
    (output,) = llm.generate([PROMPTS["words"]], [{"temperature": 0.0, "max_tokens": 1}], use_tqdm=False)
    assert len(output.multimodal_output["audio"]) == 0


def _as_request(name: str) -> dict[str, Any]:
    information = dict(PROMPTS[name].get("additional_information", {}))
    if "ref_audio" in information:
        information["ref_audio"] = as_uri(float_wav(information["ref_audio"]))
    if "context" in information:
        turns = information["context"]
        information["context"] = [
            {"voice": turn["speaker"], "audio": as_uri(float_wav(turn["audio"]))} for turn in turns
        ]
    return {"input": PROMPTS[name]["prompt"], **information}


@pytest.mark.parametrize("name", ["script", "voice", "voices"])
def test_speech_over_http(name: str, app: FastAPI, expected: dict[str, Speech]) -> None:
    answer = send(app, "POST", "/v1/audio/speech", json={**_as_request(name), "response_format": "wav"})
    assert answer.status_code == 200, answer.text
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == 24000
    wave = expected[name].audio.clamp(-1, 1)
    torch.testing.assert_close(torch.from_numpy(samples), wave, rtol=0, atol=2e-4)


def test_speech_is_streamed_over_http(app: FastAPI, expected: dict[str, Speech]) -> None:
    request = {**_as_request("voice"), "response_format": "pcm", "stream_format": "sse"}
    answer = send(app, "POST", "/v1/audio/speech", json=request)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    parts = [base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta"]
    samples = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int16).float() / 32768
    assert len(parts) > 2
    torch.testing.assert_close(samples, expected["voice"].audio.clamp(-1, 1), rtol=0, atol=2e-4)


def test_wrong_fields_are_refused_over_http(app: FastAPI) -> None:
    refused = send(app, "POST", "/v1/audio/speech", json={"input": "hello", "ref_text": "yes"})
    assert refused.status_code == 400 and "ref_text" in refused.text
