# SPDX-License-Identifier: Apache-2.0
"""Home Assistant's way to a server: its Wyoming integration talks to wyoming-openai, and that to us."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coloured_shapes.language import split_words
from tests.clients.running import ENVIRONMENT, KEY, SPOKEN, client_environment, run_program
from tests.clients.tasks import says
from tests.servers import RunningServer, free_port, running_program

pytestmark = pytest.mark.slow

WYOMING = ENVIRONMENT / "wyoming"
TEXT = "the red circle is left of the blue square"


@pytest.fixture
def wyoming_port(shapes_server: RunningServer, tmp_path: Path) -> Iterator[int]:
    """Of wyoming-openai's server, with the settings of docs/clients.md."""
    if not (WYOMING / "bin" / "python").exists():
        pytest.skip("needs wyoming-openai, and that Python 3.12 (`make clients WYOMING_PYTHON=...`)")
    port = free_port()
    settings = {
        "WYOMING_URI": f"tcp://127.0.0.1:{port}",
        **dict.fromkeys(("STT_OPENAI_URL", "TTS_OPENAI_URL"), f"{shapes_server.url}/v1"),
        **dict.fromkeys(("STT_OPENAI_KEY", "TTS_OPENAI_KEY"), KEY),
        **dict.fromkeys(("STT_MODELS", "TTS_MODELS"), shapes_server.model),
        "TTS_BACKEND": "KOKORO_FASTAPI",
    }
    command = [WYOMING / "bin" / "python", "-m", "wyoming_openai"]
    log = tmp_path / "wyoming.txt"
    with running_program(command, lambda: is_open(port), log, env=client_environment() | settings):
        yield port


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_voices_speech_and_transcription(
    shapes_server: RunningServer, wyoming_port: int, spoken: Path, tmp_path: Path
) -> None:
    file = tmp_path / "speech.wav"
    answer = run_program(
        "wyoming_satellite", shapes_server, wyoming_port, TEXT, "ben", file, spoken, environment=WYOMING
    )
    assert answer["voices"] == ["ada", "ben"]
    assert split_words(answer["transcript"]) == split_words(SPOKEN)
    assert says(file.read_bytes(), TEXT)
