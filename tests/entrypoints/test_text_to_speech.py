# SPDX-License-Identifier: Apache-2.0
"""Text-to-speech models, from prompts to sound: offline, streamed, aborted, and over HTTP."""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import soundfile
import torch
from fastapi import FastAPI

from tests.entrypoints.conftest import CSM_FRAMES, as_async, start
from tests.entrypoints.openai.media_apps import app_of, send
from tests.entrypoints.wav_files import as_uri, float_wav
from tests.model_executor.models.csm.prompts import PROMPTS as CSM
from tests.model_executor.models.higgs_audio_v2.prompts import PROMPTS as HIGGS_AUDIO
from tests.model_executor.models.vibevoice.prompts import PROMPTS as VIBEVOICE
from tests.orchestrator.pipelines import fresh_stats
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.errors import InvalidRequestError
from vllm_omni.events import CompletedEvent
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.testing.oracles.csm import CsmReference
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference
from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference

GROUP = "llm"


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        stage: That makes frames, greedily.
        arguments: Of the reference, after the prompt: the frames at most, and a seed.
        over_http: Prompts that are sent to a server, too.
        fields: Of these requests, beside the prompt's.
    """

    checkpoint: str
    prompts: dict[str, dict[str, Any]]
    reference: type[Any]
    stage: str
    arguments: tuple[int, ...]
    over_http: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)


class Speaker:
    """A pipeline, and what the reference makes of its prompts."""

    def __init__(self, model: Model, checkpoint: Path, llm: OmniLLM) -> None:
        self.model, self.checkpoint, self.llm = model, checkpoint, llm
        reference = model.reference(checkpoint)
        self.expected = {
            name: reference.speak(prompt, *model.arguments).audio for name, prompt in model.prompts.items()
        }

    def check_prompts_at_once(self) -> None:
        outputs = self.llm.generate(list(self.model.prompts.values()), use_tqdm=False)
        for output, audio in zip(outputs, self.expected.values(), strict=True):
            torch.testing.assert_close(output.multimodal_output["audio"], audio, rtol=0, atol=1e-4)
        assert outputs[0].sample_rate == 24000

    def request(self, name: str) -> dict[str, Any]:
        """A prompt as a server gets it."""
        prompt = self.model.prompts[name]
        fields = {**prompt.get("additional_information", {}), **self.model.fields}
        fields.pop("speaker", None)
        if "ref_audio" in fields:
            fields["ref_audio"] = as_uri(float_wav(fields["ref_audio"]))
        if "context" in fields:
            turns = fields["context"]
            fields["context"] = [{"voice": t["speaker"], "audio": as_uri(float_wav(t["audio"]))} for t in turns]
        return {"input": prompt["prompt"], **fields}


def check_left_stream(llm: OmniLLM, prompts: dict[str, dict[str, Any]], expected: dict[str, torch.Tensor]) -> None:
    """Leaves the stream of these prompts, which aborts the rest, when all but two have ended: each with a wave of its
    own of those `expected`, and some in several windows."""
    parts: dict[str, list[torch.Tensor]] = {}
    ended: list[str] = []
    for event in llm.generate(list(prompts.values()), stream=True, use_tqdm=False):
        if isinstance(event, CompletedEvent):
            wave = torch.cat(parts[event.request_id])
            ended += [name for name, whole in expected.items() if _are_equal(wave, whole)]
            if len(ended) == len(prompts) - 2:
                break
        elif "audio" in event.multimodal_output:
            parts.setdefault(event.request_id, []).append(event.multimodal_output["audio"])
    assert len(set(ended)) == len(prompts) - 2
    assert max(map(len, parts.values())) > 2, "sound comes in windows"


def _are_equal(wave: torch.Tensor, whole: torch.Tensor) -> bool:
    return wave.shape == whole.shape and torch.allclose(wave, whole, rtol=0, atol=1e-4)


class SpeechTests:
    """Of any model."""

    model: ClassVar[Model]

    @pytest.fixture(scope="class")
    def speaker(self, request: pytest.FixtureRequest) -> Iterator[Speaker]:
        checkpoint = request.getfixturevalue(f"tiny_{self.model.checkpoint}")
        max_frames, *seed = self.model.arguments
        greedy = {"temperature": 0.0, "max_tokens": max_frames + 1} | ({"seed": seed[0]} if seed else {})
        overrides = {self.model.stage: {"default_sampling_params": greedy}}
        with start(checkpoint, max_model_len=512, stage_overrides=overrides) as llm:
            yield Speaker(self.model, checkpoint, llm)

    @pytest.fixture(scope="class")
    def app(self, speaker: Speaker) -> FastAPI:
        return app_of(OmniEngineClient(as_async(speaker.llm)), speaker.checkpoint)

    def test_prompts_of_every_kind_at_once(self, speaker: Speaker) -> None:
        speaker.check_prompts_at_once()

    def test_a_stream_is_the_whole_and_others_are_aborted(self, speaker: Speaker) -> None:
        """Leaving the loop when some have ended aborts the rest; the next requests are not affected."""
        check_left_stream(speaker.llm, speaker.model.prompts, speaker.expected)
        speaker.check_prompts_at_once()

    def test_speech_over_http(self, speaker: Speaker, app: FastAPI) -> None:
        for name in speaker.model.over_http:
            answer = send(app, "POST", "/v1/audio/speech", json=speaker.request(name) | {"response_format": "wav"})
            assert answer.status_code == 200, answer.text
            samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
            assert rate == 24000
            wave = speaker.expected[name].clamp(-1, 1)
            torch.testing.assert_close(torch.from_numpy(samples), wave, rtol=0, atol=2e-4)


class TestCsm(SpeechTests):
    model = Model("csm", CSM, CsmReference, "backbone", (CSM_FRAMES,), ("another voice",), {"voice": "3"})

    @pytest.fixture(scope="class")
    def speaker(self, tiny_csm: Path, csm_llm: OmniLLM) -> Speaker:
        return Speaker(self.model, tiny_csm, csm_llm)

    def test_voices_over_http(self, app: FastAPI) -> None:
        voices = send(app, "GET", "/v1/audio/voices").json()["voices"]
        assert voices == [{"id": name, "name": name} for name in "0123456789"]
        refused = send(app, "POST", "/v1/audio/speech", json={"input": "hello", "voice": "ethan"})
        assert refused.status_code == 400 and "unknown voice 'ethan'" in refused.text

    def test_what_needs_text_is_refused_over_http(self, app: FastAPI) -> None:
        chat = {"messages": [{"role": "user", "content": "hello"}], "modalities": ["audio"], "audio": {"format": "wav"}}
        refused = send(app, "POST", "/v1/chat/completions", json=chat)
        assert refused.status_code == 400 and "POST /v1/audio/speech speaks a text" in refused.text
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            refused = send(app, "POST", path, json={"prompt": "hello", "tokens": [1]})
            assert refused.status_code == 400 and "neither reads nor writes tokens" in refused.text

    def test_hits_of_reference_sounds_are_counted(self, speaker: Speaker) -> None:
        def counts() -> CacheCounts:
            return fresh_stats(speaker.llm._pipeline.orchestrator)[0].caches["reference"]

        prompt = speaker.model.prompts["reference"]
        speaker.llm.generate(prompt, use_tqdm=False)
        before = counts()
        speaker.llm.generate(prompt, use_tqdm=False)
        after = counts()
        assert after.hits - before.hits == after.queries - before.queries == 1

    def test_a_wrong_field_is_refused_by_name(self, speaker: Speaker) -> None:
        with pytest.raises(InvalidRequestError, match=r"'language'.*speaker, context, ref_audio"):
            speaker.llm.generate({"prompt": "hello", "additional_information": {"language": "english"}})


@pytest.mark.slow
class TestHiggsAudio(SpeechTests):
    model = Model("higgs_audio_v2", HIGGS_AUDIO, HiggsAudioReference, "backbone", (60,), ("scene", "reference"))

    def test_wrong_repeat_limits_are_refused_before_the_engine(self, speaker: Speaker, app: FastAPI) -> None:
        extra_args = {"ras_win_len": 99, "ras_win_max_num_repeat": 2}
        params = [{"temperature": 1.0, "extra_args": extra_args}, None]
        with pytest.raises(InvalidRequestError, match="ras_win_len"):
            speaker.llm.generate(speaker.model.prompts["short"], params, use_tqdm=False)
        request = {"input": "a b c", "sampling_params_list": [{"extra_args": extra_args}, None]}
        refused = send(app, "POST", "/v1/audio/speech", json=request)
        assert refused.status_code == 400 and "'extra_args'" in refused.text


@pytest.mark.slow
class TestVibeVoice(SpeechTests):
    model = Model("vibevoice", VIBEVOICE, VibeVoiceReference, "language_model", (40, 3), ("script", "voice", "voices"))

    def test_an_end_at_once_is_no_sound(self, speaker: Speaker) -> None:
        params = [{"temperature": 0.0, "max_tokens": 1}]
        (output,) = speaker.llm.generate([speaker.model.prompts["words"]], params, use_tqdm=False)
        assert len(output.multimodal_output["audio"]) == 0

    def test_speech_is_streamed_over_http(self, speaker: Speaker, app: FastAPI) -> None:
        request = {**speaker.request("voice"), "response_format": "pcm", "stream_format": "sse"}
        answer = send(app, "POST", "/v1/audio/speech", json=request)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        parts = [base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta"]
        samples = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int16).float() / 32768
        assert len(parts) > 2
        torch.testing.assert_close(samples, speaker.expected["voice"].clamp(-1, 1), rtol=0, atol=2e-4)

    def test_wrong_fields_are_refused_over_http(self, app: FastAPI) -> None:
        refused = send(app, "POST", "/v1/audio/speech", json={"input": "hello", "ref_text": "yes"})
        assert refused.status_code == 400 and "ref_text" in refused.text
