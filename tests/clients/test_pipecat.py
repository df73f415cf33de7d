# SPDX-License-Identifier: Apache-2.0
"""Pipecat's services for OpenAI, in pipelines."""

from pathlib import Path

import pytest

from coloured_shapes.language import split_words
from tests.clients.running import SPOKEN, run_program
from tests.clients.tasks import says, shows
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


def test_an_answer_read_aloud(shapes_server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    answer = run_program("pipecat_chat", shapes_server, f"Say: {SPOKEN}.", file)
    assert split_words(answer["text"]) == split_words(SPOKEN)
    assert says(file.read_bytes(), SPOKEN)


def test_transcription(shapes_server: RunningServer, spoken: Path) -> None:
    answer = run_program("pipecat_transcription", shapes_server, spoken)
    assert split_words(answer["text"]) == split_words(SPOKEN)


@pytest.mark.parametrize("model", [None, "dall-e-3"], ids=["base64", "URL of dall-e-3"])
def test_picture(painter_server: RunningServer, tmp_path: Path, model: str | None) -> None:
    file = tmp_path / "picture.png"
    answer = run_program("pipecat_image", painter_server, SPOKEN, file, model=model)
    assert (answer["url"] is None) == (model is None)
    assert shows(file.read_bytes(), SPOKEN)
