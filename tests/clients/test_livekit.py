# SPDX-License-Identifier: Apache-2.0
"""LiveKit Agents with its plugin for OpenAI."""

from pathlib import Path

import pytest

from coloured_shapes.language import split_words
from tests.clients.running import SPOKEN, run_program
from tests.clients.tasks import Question, says
from tests.servers import RunningServer

pytestmark = pytest.mark.slow

TEXT = "the red circle is left of the blue square"


@pytest.mark.parametrize("model", [None, "tts-1"], ids=["events", "bytes of tts-1"])
def test_speech(shapes_server: RunningServer, tmp_path: Path, model: str | None) -> None:
    file = tmp_path / "speech.wav"
    answer = run_program("livekit_speech", shapes_server, TEXT, file, model=model)
    assert 1 < answer["seconds"] < 10
    assert says(file.read_bytes(), TEXT)


@pytest.mark.parametrize("model", [None, "whisper-1"], ids=["json", "verbose_json of whisper-1"])
def test_transcription(shapes_server: RunningServer, spoken: Path, model: str | None) -> None:
    answer = run_program("livekit_transcription", shapes_server, spoken, model=model)
    assert split_words(answer["text"]) == split_words(SPOKEN)


def test_chat_about_a_picture(shapes_server: RunningServer, question: Question) -> None:
    answer = run_program("livekit_chat", shapes_server, question.text, question.picture)
    assert split_words(answer["text"]) == split_words(question.answer)
    assert answer["tokens"] > 5
