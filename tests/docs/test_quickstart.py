# SPDX-License-Identifier: Apache-2.0
"""Runs every command and program of docs/quickstart.md, in their order, as a reader does, and compares what comes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import wave
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.pages import ROOT, Snippet, is_answer, prose, snippets
from tests.servers import free_port, import_path

PAGE = ROOT / "docs" / "quickstart.md"
SNIPPETS = snippets("bash", "python", pages=[PAGE])
# Of these pages, the first program with these words runs against the same server.
TASKS = [
    ("README.md", "localhost"), ("docs/chat.md", ""), ("docs/speech.md", ""), ("docs/speech.md", "transcriptions"),
    ("docs/realtime.md", ""),
]  # fmt: skip
# What those pages take for granted.
FRAGMENT = """
import ast, asyncio, base64, inspect, sys
import openai
client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
play = lambda sound: print(len(sound), "bytes")
result = eval(compile(sys.argv[1], "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
if inspect.iscoroutine(result):
    asyncio.run(result)
"""
# Machines that run tests have no sound card. This says what the player of ALSA does of a file, if it has sound.
PLAYER = """#!/usr/bin/env python3
import sys, wave
with wave.open(sys.argv[1]) as file:
    kinds = {1: "Mono", 2: "Stereo"}
    print(f"Playing WAVE '{sys.argv[1]}' : Signed {8 * file.getsampwidth()} bit Little Endian, "
          f"Rate {file.getframerate()} Hz, {kinds[file.getnchannels()]}")
    sys.exit(not any(file.readframes(file.getnframes())))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is the one of this test."""
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", "demo_output", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


class Reader:
    """Somebody at a shell, and at another one while the server runs."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        self._log = checkout / "server.txt"
        # Without what other tests of this process have set for vLLM, and what a make that runs the tests has set.
        others = ("VLLM_", "MAKE", "MFLAGS")
        own = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        player = checkout / "bin" / "aplay"
        player.parent.mkdir()
        player.write_text(PLAYER)
        player.chmod(0o755)
        path = os.pathsep.join([str(player.parent), os.environ["PATH"]])
        self._environment = {**own, "PYTHONPATH": import_path(ROOT), "PATH": path}
        self._server: subprocess.Popen | None = None

    @cached_property
    def _port(self) -> int:
        """Taken when the server starts: another process may get a free port meanwhile."""
        return free_port()

    def run(self, snippet: Snippet) -> str:
        """
        Returns:
            What it prints; of the server, until it is ready. It names the port of the page.
        """
        text = snippet.text.replace("make ", "make -o .venv/.ready-cpu ")  # The environment is ready.
        # Another port, since 8000, which is the examples' default, may be taken.
        text = re.sub(r"(python examples/\S+)", r"\1 --base-url http://localhost:8000/v1", text)
        text = re.sub("8000", lambda _: str(self._port), text)
        if snippet.language == "python":
            output = self._run([".venv/bin/python", "-c", text])
        elif text.startswith("vllm serve"):
            output = self._serve(text)
        else:
            output = self._run(["bash", "-euc", self._in_environment(text)])
        return output.replace(str(self._port), "8000") if "8000" in snippet.text else output

    def run_fragment(self, text: str) -> str:
        """The same for a Python program that has `client`."""
        own, theirs = (part.replace("8000", str(self._port)) for part in (FRAGMENT, text))
        return self._run([".venv/bin/python", "-c", own, theirs])

    def open(self, url: str) -> str:
        """What a browser gets, as text."""
        with urllib.request.urlopen(url.replace("8000", str(self._port)), timeout=60) as answer:
            return answer.read().decode()

    def _serve(self, text: str) -> str:
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-euc", self._in_environment("exec " + text)],
                cwd=self._checkout,
                env=self._environment,
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        wait = f"until curl -sf http://localhost:{self._port}/health; do kill -0 {self._server.pid}; sleep 0.2; done"
        self._run(["bash", "-euc", wait])
        return self._log.read_text()

    def _in_environment(self, text: str) -> str:
        return text if ".venv/bin/activate" in text else f". .venv/bin/activate\n{text}"

    def _run(self, command: list[str]) -> str:
        result = subprocess.run(
            command, cwd=self._checkout, env=self._environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command[-1]}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result.stdout

    def close(self) -> None:
        if self._server is not None:
            try:
                self._server.send_signal(signal.SIGTERM)
                assert self._server.wait() == 0
            finally:
                self._server.kill()


@pytest.fixture
def reader(checkout: Path) -> Iterator[Reader]:
    reader = Reader(checkout)
    yield reader
    reader.close()


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("make", "curl"))), reason="make or curl is not installed")
@pytest.mark.timeout(600)
def test_every_block_does_what_the_page_shows(reader: Reader, checkout: Path) -> None:
    for snippet in SNIPPETS:
        output = reader.run(snippet)
        assert is_answer(snippet.answer or "", output), f"{snippet}: {snippet.text}\n{output}"
    addresses = re.findall(r"\]\((http://localhost:8000\S*)\)", prose(PAGE))
    assert {Path(address).name for address in addresses} == {"playground", "docs"}
    assert all("<html" in reader.open(address).lower() for address in addresses)
    for page, words in TASKS:
        program = next(program for program in snippets("python", pages=[ROOT / page]) if words in program.text)
        output = reader.run_fragment(program.text)
        assert output.strip() or "to_file" in program.text, f"{program}: {program.text}"
    assert (checkout / "demo_output" / "index.html").exists()
    assert (checkout / "speech.mp3").stat().st_size > 1000
    for name in ("answer.wav", "streamed.wav", "well_done.wav"):
        with wave.open(str(checkout / name)) as file:
            assert file.getframerate() == 24_000
    assert Image.open(checkout / "painting.png").size == (96, 96)


def test_every_block_has_an_answer() -> None:
    assert len(SNIPPETS) == 7
    assert [str(snippet) for snippet in SNIPPETS if not snippet.answer] == []


@pytest.mark.parametrize(
    ("shown", "output", "expected"),
    [
        ("It is Paris.\n", "It is Paris.\n", True),
        ("It is Paris.\n", "It is Rome.\n", False),
        ("It is Paris.\n", "It is Paris.\nIt is Rome.\n", False),
        ('{"id":"...","n":2}\n', '{"id":"chat-1","n":2}', True),
        ('{"id":"...","n":2}\n', '{"id":"chat-1","n":3}', False),
        ("...\nready after 2.1 s\n...\n", "1\n2\nready after 13 s\n", True),
        ("...\nready after 2.1 s\n...\n", "1\n2\nready\n", False),
        ("INFO 11-28 22:04:05 ready\n", "INFO 12-01 00:00:00 ready\n", True),
    ],
)
def test_what_is_shown_is_compared(shown: str, output: str, expected: bool) -> None:
    assert is_answer(shown, output) == expected
