# SPDX-License-Identifier: Apache-2.0
"""LiveKit Agents with its plugin for OpenAI."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.running import SPOKEN, run_program
from tests.servers import RunningServer
from vllm_omni.shapes.language import Scene, Shape, split_words
from vllm_omni.shapes.pictures import draw

pytestmark = pytest.mark.slow

TEXT = "the red circle is left of the blue square"


@pytest.mark.parametrize("model", [None, "tts-1"], ids=["events", "bytes of tts-1"])
def test_speech(
    shapes_server: RunningServer, understood: Callable[[str, Path], float], tmp_path: Path, model: str | None
) -> None:
    file = tmp_path / "speech.wav"
    answer = run_program("livekit_speech", shapes_server, TEXT, file, model=model)
    assert 1 < answer["seconds"] < 10
    assert understood(TEXT, file) >= 0.75


@pytest.mark.parametrize("model", [None, "whisper-1"], ids=["json", "verbose_json of whisper-1"])
def test_transcription(shapes_server: RunningServer, spoken: Path, model: str | None) -> None:
    answer = run_program("livekit_transcription", shapes_server, spoken, model=model)
    assert split_words(answer["text"]) == split_words(SPOKEN)


def test_chat_about_a_picture(shapes_server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    draw(random.Random(0), Scene((Shape("circle", "red", "large", 0), Shape("star", "blue", "large", 8)))).save(file)
    answer = run_program("livekit_chat", shapes_server, "What is in the picture?", file)
    assert {"red", "circle", "blue", "star"} <= set(split_words(answer["text"]))
    assert answer["tokens"] > 5
