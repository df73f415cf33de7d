# SPDX-License-Identifier: Apache-2.0
"""The voice and the recognizer, without a pipeline: the one understands the other."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import WRITING_STAGE
from tests.orchestrator.pipelines import function_stage
from vllm_omni import AsyncOmniLLM
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.config.utils import convert
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import CALLER, SOUND_RATE
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni_talk.speech_recognition import resample

pytest.importorskip("hibari", reason="the extra talk is not installed")
pytest.importorskip("pocketsphinx", reason="the extra talk is not installed")

from vllm_omni_talk import SAMPLE_RATE
from vllm_omni_talk.recognizer import Recognizer
from vllm_omni_talk.voice import Voice, VoiceParameters

REQUEST = StageRequest(request_id="r")
STAGE = OmniStageConfig(stage_id=1, engine_type="function")
SENTENCES = "The Moon orbits the Earth. It is smaller than our planet."


@pytest.fixture(scope="module")
def voice() -> Voice:
    voice = Voice(STAGE, "")
    voice.start()
    return voice


def written(text: str, stage_id: int = 0) -> dict[int, StageOutput]:
    return {0: StageOutput(request_id="r", stage_id=stage_id, completions=[Completion(text=text)])}


def speak(voice: Voice, /, *windows: str, **parameters: object) -> list[torch.Tensor]:
    """The pieces of sound for a text in windows."""
    state = voice.begin(REQUEST, convert(parameters, VoiceParameters))
    return [piece["audio"] for window in windows for piece in voice.window(state, written(window))]


def test_each_sentence_is_a_piece(voice: Voice) -> None:
    pieces = speak(voice, SENTENCES)
    assert len(pieces) == 2
    for piece in pieces:
        assert piece.dtype == torch.float32 and piece.dim() == 1
        assert 1 < len(piece) / SAMPLE_RATE < 4 and 0.1 < piece.abs().max() <= 1


def test_the_same_seed_gives_the_same_samples_whatever_the_windows_are(voice: Voice) -> None:
    whole = torch.cat(speak(voice, SENTENCES, seed=7))
    first, second = SENTENCES.split(". ")
    assert torch.equal(whole, torch.cat(speak(voice, f"{first}. ", second, seed=7)))
    assert not torch.equal(whole, torch.cat(speak(voice, SENTENCES, seed=8)))


def test_speed(voice: Voice) -> None:
    normal, fast = (sum(map(len, speak(voice, SENTENCES, speed=speed))) for speed in (1.0, 2.0))
    assert 0.4 < fast / normal < 0.6


def test_a_block_of_code_in_several_windows_is_not_spoken(voice: Voice) -> None:
    pieces = speak(voice, "```\n", "x = 1.\n", "```\n", "Hello.")
    assert [len(piece) > 0 for piece in pieces] == [False, False, False, True]


def test_a_sentence_that_cannot_be_spoken_loses_itself_only(
    voice: Voice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = voice.begin(REQUEST, VoiceParameters())
    phonemize = state.voice.phonemize

    def fail_on_three(text: str) -> list[str]:
        if "three" in text:
            raise IndexError("list index out of range")
        return phonemize(text)

    monkeypatch.setattr(state.voice, "phonemize", fail_on_three)
    windows = ("This is one. This is three. This is two.", "And three.", "This is four.")
    pieces = [[piece["audio"] for piece in voice.window(state, written(window))] for window in windows]
    assert [len(sounds) for sounds in pieces] == [2, 0, 1] and all(map(len, (*pieces[0], *pieces[2])))
    assert [record.message for record in caplog.records] == [
        f"request r, stage 1 (stage1): a sentence of {number} characters cannot be spoken and is left out"
        for number in (14, 10)
    ]


def test_long_numbers_and_clauses(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesizer = voice.begin(REQUEST, VoiceParameters()).voice
    sizes: list[int] = []

    def synthesize(ids: Any, *others: Any) -> np.ndarray:
        """The number's sevens alone would take 20 s."""
        sizes.append(len(ids))
        return compute(ids, *others) if len(sizes) < 3 or len(ids) < 20 else np.ones(1, np.float32)

    compute = synthesizer.from_ids
    with monkeypatch.context() as patch:
        patch.setattr(synthesizer, "from_ids", synthesize)
        assert all(map(len, speak(voice, f"It is {'7' * 5000}. Yes.")))
    assert len(sizes) > 20 and max(sizes) < 450 and sizes[-1] < 20

    pieces = speak(voice, "word " * 200)
    assert len(pieces) == 4 and max(map(len, pieces)) < 30 * SAMPLE_RATE


@pytest.mark.parametrize("text", ["...", "\U0001f600", "```\nx = 1\n```", "\u4f60\u597d.", "!?", ""])
def test_a_text_without_words_is_refused_of_a_caller_only(voice: Voice, text: str) -> None:
    for stage_id in (0, CALLER):
        state = voice.begin(REQUEST, VoiceParameters())
        assert [piece["audio"].numel() for piece in voice.window(state, written(text, stage_id))] == [0]
        if stage_id != CALLER:
            assert voice.end(state) is None
        else:
            with pytest.raises(InvalidRequestError, match="the text has no words that this voice can speak"):
                voice.end(state)

    state = voice.begin(REQUEST, VoiceParameters())
    assert [len(piece["audio"]) > 0 for piece in voice.window(state, written(f"Hello.\n{text}", CALLER))] == [True]
    assert voice.end(state) is None


def test_letters_that_are_left_out_are_logged(voice: Voice, caplog: pytest.LogCaptureFixture) -> None:
    state = voice.begin(REQUEST, VoiceParameters())
    for text in ("Hello \u4f60\u597d, na\u00efve caf\u00e9. ", "It is \u0e44\u0e17\u0e22, \u03b1."):
        assert all(len(piece["audio"]) for piece in voice.window(state, written(text)))
    assert caplog.records == []
    voice.end(state)
    (record,) = caplog.records
    assert record.message == (
        "request r, stage 1 (stage1): the voice leaves out letters that it does not know: 2 CJK, 3 THAI"
    )


def test_the_voices_are_those_on_this_machine(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIBARI_HOME", "/nowhere")
    assert Voice.voices() == ["heart"]
    with pytest.raises(ValueError, match="there is no voice 'emma' here; there is heart"):
        speak(voice, "Hello.", voice="emma")


def test_the_recognizer_understands_the_voice(voice: Voice) -> None:
    sound = torch.cat(speak(voice, SENTENCES)).numpy()
    heard = torch.from_numpy(resample(sound, SAMPLE_RATE, SOUND_RATE))
    recognizer = Recognizer(STAGE, "")
    recognizer.start()
    state = recognizer.begin(REQUEST, None)
    for part in heard.split(SOUND_RATE):
        window = {0: StageOutput(request_id="r", stage_id=0, tensors={"audio": part})}
        assert recognizer.window(state, window) == {}
    words = recognizer.end(state)["text"].split()
    assert {"moon", "earth", "smaller", "planet"} <= set(words)
    assert recognizer.end([]) == {"text": ""}


@pytest.mark.slow
def test_nothing_is_reported(tmp_path: Path) -> None:
    """What onnxruntime reports it notes in the temporary directory when it is imported, but not where CI runs."""
    environment = {name: value for name in ("PATH", "HOME", "PYTHONPATH") if (value := os.environ.get(name))}
    command = [sys.executable, "-c", "import vllm_omni_talk.voice, onnxruntime"]
    subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, check=True)
    assert not (tmp_path / ".ses").exists()


@pytest.mark.slow
def test_a_text_without_words_is_the_callers_mistake_and_a_reply_without_words_is_silent(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    speaking = function_stage(1, "tts", Voice, (0,), "audio") | {"accepts": "text", "sample_rate": SAMPLE_RATE}
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [WRITING_STAGE, speaking]) as llm:
        server = FakeServer(llm)

        def speak(text: str, **fields: object) -> httpx.Response:
            return send(
                server.app, "POST", "/v1/audio/speech", json={"input": text, "response_format": "pcm", **fields}
            )

        for fields in ({}, {"stream": False}, {"stream_format": "sse"}):
            refused = speak("...", **fields)
            assert refused.status_code == 400, refused.text
            assert "the text has no words that this voice can speak" in refused.json()["error"]["message"]
        spoken = speak(f"It is {'7' * 40}.")
        assert spoken.status_code == 200 and len(spoken.content) > SAMPLE_RATE

        async def reply(text: str) -> torch.Tensor:
            events = [event async for event in llm.generate({"prompt": text, "modalities": ["audio"]})]
            return events[-1].outputs[0].multimodal_output["audio"]

        assert [asyncio.run(reply(text)).numel() > 0 for text in ("...", "Hello.", "...")] == [False, True, False]
