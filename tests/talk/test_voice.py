# SPDX-License-Identifier: Apache-2.0
"""The voice and the recognizer, without a pipeline: the one understands the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.config.utils import convert
from vllm_omni.function_stage import SOUND_RATE
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.speech_recognition import resample

pytest.importorskip("hibari", reason="the extra talk is not installed")
pytest.importorskip("pocketsphinx", reason="the extra talk is not installed")

from vllm_omni.talk import SAMPLE_RATE
from vllm_omni.talk.recognizer import Recognizer
from vllm_omni.talk.voice import Voice, VoiceParameters

REQUEST = StageRequest(request_id="r")
STAGE = OmniStageConfig(stage_id=1, engine_type="function")
SENTENCES = "The Moon orbits the Earth. It is smaller than our planet."


@pytest.fixture(scope="module")
def voice() -> Voice:
    voice = Voice(STAGE, "")
    voice.start()
    return voice


def written(text: str) -> dict[int, StageOutput]:
    return {0: StageOutput(request_id="r", stage_id=0, completions=[Completion(text=text)])}


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
    command = [sys.executable, "-c", "import vllm_omni.talk.voice, onnxruntime"]
    subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, check=True)
    assert not (tmp_path / ".ses").exists()
