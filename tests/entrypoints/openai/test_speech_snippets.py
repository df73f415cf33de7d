# SPDX-License-Identifier: Apache-2.0
"""OpenAI's documented programs for speech; only the model's name is replaced.

The address and the key come from the environment, as OpenAI's client has it.
"""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from tests.entrypoints.openai.test_audio_formats import decode
from tests.servers import RunningServer

GROUP = "server"
pytestmark = pytest.mark.slow

TO_A_FILE = """
from pathlib import Path
from openai import OpenAI

client = OpenAI()
speech_file_path = Path(__file__).parent / "speech.mp3"

with client.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="coral",
    input="Today is a wonderful day to build something people love!",
    instructions="Speak in a cheerful and positive tone.",
) as response:
    response.stream_to_file(speech_file_path)
"""
TO_A_FILE_WITHOUT_A_CLIENT = """
from pathlib import Path
import openai

speech_file_path = Path(__file__).parent / "speech.mp3"
with openai.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="alloy",
    input="The quick brown fox jumped over the lazy dog."
) as response:
    response.stream_to_file(speech_file_path)
"""
TO_A_FILE_AT_ONCE = """
from openai import OpenAI
from pathlib import Path

client = OpenAI()

response = client.audio.speech.create(
    model="gpt-4o-mini-tts",
    voice="nova",
    input="Hello world! This is a streaming test.",
)
response.write_to_file(Path(__file__).parent / "speech.mp3")
"""
TO_THE_SPEAKER = """
import asyncio

from openai import AsyncOpenAI
from openai.helpers import LocalAudioPlayer

openai = AsyncOpenAI()

async def main() -> None:
    async with openai.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts",
        voice="coral",
        input="Today is a wonderful day to build something people love!",
        instructions="Speak in a cheerful and positive tone.",
        response_format="pcm",
    ) as response:
        await LocalAudioPlayer().play(response)

if __name__ == "__main__":
    asyncio.run(main())
"""
AS_EVENTS = """
from openai import OpenAI

client = OpenAI()

with client.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="coral",
    input="Today is a wonderful day to build something people love!",
    response_format="pcm",
    stream_format="sse",
) as response:
    lines = list(response.iter_lines())
"""
WITH_CURL = """
curl https://api.openai.com/v1/audio/speech \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "gpt-4o-mini-tts",
    "input": "Today is a wonderful day to build something people love!",
    "voice": "coral",
    "instructions": "Speak in a cheerful and positive tone."
  }' \\
  --output speech.mp3
"""


@pytest.fixture
def run(omni_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a program as a script in `tmp_path`; its variables."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{omni_server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(openai, "_client", None)  # `openai.audio` uses a client that keeps its address.

    def run(program: str) -> dict[str, Any]:
        script = tmp_path / "snippet.py"
        script.write_text(program.replace("gpt-4o-mini-tts", omni_server.model))
        return runpy.run_path(str(script), run_name="__main__")

    return run


def check_mp3(path: Path) -> None:
    samples, rate = decode(path.read_bytes())
    assert rate == 24000 and len(samples) > 0 and np.abs(samples).max() > 0


@pytest.mark.parametrize("program", [TO_A_FILE, TO_A_FILE_WITHOUT_A_CLIENT, TO_A_FILE_AT_ONCE])
def test_to_a_file(run: Callable[[str], Any], tmp_path: Path, program: str) -> None:
    run(program)
    check_mp3(tmp_path / "speech.mp3")


class Speaker:
    """In place of sounddevice's `OutputStream`: plays at once, and keeps the samples."""

    def __init__(self) -> None:
        self.samples: list[np.ndarray] = []

    def __call__(self, *, samplerate: int, channels: int, dtype: Any, callback: Callable[..., None]) -> "Speaker":
        self.rate, self._shape, self._dtype, self._callback = samplerate, (1024, channels), dtype, callback
        return self

    def __enter__(self) -> None:
        try:
            while True:
                block = np.zeros(self._shape, self._dtype)
                self._callback(block, len(block), None, None)
                self.samples.append(block)
        except StopIteration:
            pass

    def __exit__(self, *_: object) -> None:
        pass


def test_to_the_speaker(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker()
    sounddevice = SimpleNamespace(OutputStream=speaker, CallbackStop=StopIteration)
    monkeypatch.setitem(sys.modules, "sounddevice", sounddevice)  # type: ignore[arg-type]
    run(TO_THE_SPEAKER)
    played = np.concatenate(speaker.samples)
    assert speaker.rate == 24000 and played.shape[1] == 1 and 0 < np.abs(played).max() <= 1


def test_as_events(run: Callable[[str], Any]) -> None:
    lines = [line for line in run(AS_EVENTS)["lines"] if line]
    assert all(line.startswith('data: {"type":"speech.audio.delta","audio":"') for line in lines[:-1])
    assert lines[-1].startswith('data: {"type":"speech.audio.done",') and '"usage":{"input_tokens":' in lines[-1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_with_curl(omni_server: RunningServer, tmp_path: Path) -> None:
    command = WITH_CURL.replace("https://api.openai.com", omni_server.url).replace("gpt-4o-mini-tts", omni_server.model)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"OPENAI_API_KEY": "none"}, check=True)
    check_mp3(tmp_path / "speech.mp3")
