# SPDX-License-Identifier: Apache-2.0
"""The servers of the shipped models that all files of this folder share, with a key, and who judges their answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.running import KEY, SPOKEN, skip_without_clients
from tests.clients.tasks import Question, write_question
from tests.servers import SAME_PAINTING, RunningServer


@pytest.fixture(scope="session")
def shapes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`shapes`: hears, sees, writes and speaks, and calls tools. It was not trained to: a grammar without spaces, which
    it would not end, writes all of a call but the values."""
    grammars = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
    yield from _serve("shapes", tmp_path_factory, "--enable-auto-tool-choice", "--tool-call-parser=pythonic", grammars)


@pytest.fixture(scope="session")
def painter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`shapes-painter`: paints."""
    yield from _serve("shapes-painter", tmp_path_factory, SAME_PAINTING)


@pytest.fixture(scope="session")
def spoken(shapes_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WAV file of a voice that says "say" and `SPOKEN`, which is what `shapes` transcribes."""
    speech = shapes_server.openai(api_key=KEY).audio.speech.create(
        model="tts-1", voice="alloy", input=f"Say {SPOKEN}", response_format="wav", extra_body={"stream": False}
    )
    file = tmp_path_factory.mktemp("spoken") / "spoken.wav"
    file.write_bytes(speech.content)
    return file


@pytest.fixture(scope="session")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    return write_question(tmp_path_factory.mktemp("question"))


def _serve(model: str, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[RunningServer]:
    skip_without_clients()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = RunningServer(model, f"--api-key={KEY}", "--public-lists", *flags, log=log)
    yield server
    server.stop()
