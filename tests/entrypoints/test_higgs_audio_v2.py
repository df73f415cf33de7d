# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio v2, from prompts to sound: offline, streamed, aborted, and over HTTP."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile
import torch
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async, start
from tests.entrypoints.openai.media_apps import app_of, send
from tests.entrypoints.speech_streams import check_left_stream
from tests.entrypoints.wav_files import as_uri, float_wav
from tests.model_executor.models.higgs_audio_v2.prompts import PROMPTS
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.errors import InvalidRequestError
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference, Speech

pytestmark = pytest.mark.slow
MAX_ROWS = 60


@pytest.fixture(scope="module")
def llm(tiny_higgs_audio_v2: Path) -> Iterator[OmniLLM]:
    greedy = {"default_sampling_params": {"temperature": 0.0, "max_tokens": MAX_ROWS + 1}}
    with start(tiny_higgs_audio_v2, max_model_len=512, stage_overrides={"backbone": greedy}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_higgs_audio_v2: Path) -> dict[str, Speech]:
    reference = HiggsAudioReference(tiny_higgs_audio_v2)
    return {name: reference.speak(prompt, MAX_ROWS) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def app(llm: OmniLLM, tiny_higgs_audio_v2: Path) -> FastAPI:
    return app_of(OmniEngineClient(as_async(llm)), tiny_higgs_audio_v2)


def test_prompts_of_every_kind_at_once(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    outputs = llm.generate(list(PROMPTS.values()), use_tqdm=False)
    for output, speech in zip(outputs, expected.values(), strict=True):
        torch.testing.assert_close(output.multimodal_output["audio"], speech.audio, rtol=0, atol=1e-4)
    assert outputs[0].sample_rate == 24000


def test_a_stream_is_the_whole_and_others_are_aborted(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    """Leaving the loop when some have ended aborts the rest; the next requests are not affected."""
    check_left_stream(llm, PROMPTS, {name: speech.audio for name, speech in expected.items()})
    test_prompts_of_every_kind_at_once(llm, expected)


def test_wrong_repeat_limits_are_refused_before_the_engine(llm: OmniLLM, app: FastAPI) -> None:
    extra_args = {"ras_win_len": 99, "ras_win_max_num_repeat": 2}
    with pytest.raises(InvalidRequestError, match="ras_win_len is 1 to 16"):
        llm.generate(PROMPTS["short"], [{"temperature": 1.0, "extra_args": extra_args}, None], use_tqdm=False)
    request = {"input": "a b c", "sampling_params_list": [{"extra_args": extra_args}, None]}
    refused = send(app, "POST", "/v1/audio/speech", json=request)
    assert refused.status_code == 400 and "unknown sampling parameter 'extra_args'" in refused.text


def test_speech_over_http(app: FastAPI, expected: dict[str, Speech]) -> None:
    for name in ("scene", "reference"):
        information = dict(PROMPTS[name]["additional_information"])
        if "ref_audio" in information:
            information["ref_audio"] = as_uri(float_wav(information["ref_audio"]))
        request = {"input": PROMPTS[name]["prompt"], "response_format": "wav", **information}
        answer = send(app, "POST", "/v1/audio/speech", json=request)
        assert answer.status_code == 200, answer.text
        samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
        assert rate == 24000
        wave = expected[name].audio.clamp(-1, 1)
        torch.testing.assert_close(torch.from_numpy(samples), wave, rtol=0, atol=2e-4)
