# SPDX-License-Identifier: Apache-2.0
"""A text-to-speech model, from prompts to sound: offline, streamed, aborted, and over HTTP."""

import io
from pathlib import Path

import pytest
import soundfile
import torch
from fastapi import FastAPI

from tests.entrypoints.conftest import CSM_FRAMES, as_async
from tests.entrypoints.openai.media_apps import app_of, send
from tests.entrypoints.speech_streams import check_left_stream
from tests.model_executor.models.csm.prompts import PROMPTS
from tests.orchestrator.pipelines import fresh_stats
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.errors import InvalidRequestError
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.testing.oracles.csm import CsmReference, Speech

GROUP = "llm"


@pytest.fixture(scope="module")
def llm(csm_llm: OmniLLM) -> OmniLLM:
    return csm_llm


@pytest.fixture(scope="module")
def expected(tiny_csm: Path) -> dict[str, Speech]:
    reference = CsmReference(tiny_csm)
    return {name: reference.speak(prompt, CSM_FRAMES) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def app(llm: OmniLLM, tiny_csm: Path) -> FastAPI:
    return app_of(OmniEngineClient(as_async(llm)), tiny_csm)


def test_prompts_of_every_kind_at_once(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    outputs = llm.generate(list(PROMPTS.values()), use_tqdm=False)
    for output, speech in zip(outputs, expected.values(), strict=True):
        audio = output.multimodal_output["audio"]
        torch.testing.assert_close(audio, speech.audio, rtol=0, atol=1e-4)
    assert outputs[0].sample_rate == 24000


def test_a_stream_is_the_whole_and_others_are_aborted(llm: OmniLLM, expected: dict[str, Speech]) -> None:
    """Leaving the loop when some have ended aborts the rest; the next requests are not affected."""
    check_left_stream(llm, PROMPTS, {name: speech.audio for name, speech in expected.items()})
    test_prompts_of_every_kind_at_once(llm, expected)


def test_hits_of_reference_sounds_are_counted(llm: OmniLLM) -> None:
    def counts() -> CacheCounts:
        return fresh_stats(llm._pipeline.orchestrator)[0].caches["reference"]

    prompt = next(prompt for prompt in PROMPTS.values() if "ref_audio" in prompt.get("additional_information", {}))
    llm.generate(prompt, use_tqdm=False)
    before = counts()
    llm.generate(prompt, use_tqdm=False)
    after = counts()
    assert after.hits - before.hits == after.queries - before.queries == 1


def test_a_wrong_field_is_refused_by_name(llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"reads no 'language'.*speaker, context, ref_audio"):
        llm.generate({"prompt": "hello", "additional_information": {"language": "english"}})


def test_speech_over_http(app: FastAPI, expected: dict[str, Speech]) -> None:
    request = {"input": PROMPTS["another voice"]["prompt"], "voice": "3", "response_format": "wav"}
    answer = send(app, "POST", "/v1/audio/speech", json=request)
    assert answer.status_code == 200, answer.text
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == 24000
    wave = expected["another voice"].audio.clamp(-1, 1)
    torch.testing.assert_close(torch.from_numpy(samples), wave, rtol=0, atol=2e-4)
    voices = send(app, "GET", "/v1/audio/voices").json()["voices"]
    assert voices == [{"id": name, "name": name} for name in "0123456789"]
    refused = send(app, "POST", "/v1/audio/speech", json=request | {"voice": "ethan"})
    assert refused.status_code == 400 and "unknown voice 'ethan'" in refused.text


def test_what_needs_text_is_refused_over_http(app: FastAPI) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "modalities": ["audio"], "audio": {"format": "wav"}}
    refused = send(app, "POST", "/v1/chat/completions", json=chat)
    assert refused.status_code == 400 and "POST /v1/audio/speech speaks a text" in refused.text
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        refused = send(app, "POST", path, json={"prompt": "hello", "tokens": [1]})
        assert refused.status_code == 400 and "neither reads nor writes tokens" in refused.text
