# SPDX-License-Identifier: Apache-2.0
"""Runs every command and program of docs/quickstart.md, in their order, as a reader does."""

import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.pages import ROOT, Snippet, snippets
from tests.servers import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("make", "curl"))), reason="make or curl is not installed"),
]
SNIPPETS = snippets("bash", "python", pages=[ROOT / "docs" / "quickstart.md"])


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
        # Without what other tests of this process have set for vLLM.
        own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._environment = {**own, "PYTHONPATH": str(ROOT)}
        self._server: subprocess.Popen | None = None

    @cached_property
    def _port(self) -> int:
        """Taken when the server starts: another process may get a free port meanwhile."""
        return free_port()

    def run(self, snippet: Snippet) -> None:
        text = snippet.text.replace("make ", "make -o .venv/.ready-cpu ")  # The environment is ready.
        # Another port, since 8000, which is the examples' default, may be taken.
        text = re.sub(r"(python examples/\S+)", r"\1 --base-url http://localhost:8000/v1", text)
        text = re.sub("8000", lambda _: str(self._port), text)
        if snippet.language == "python":
            self._run([".venv/bin/python", "-c", text])
        elif text.startswith("vllm serve"):
            self._serve(text)
        else:
            self._run(["bash", "-euc", self._in_environment(text)])

    def _serve(self, text: str) -> None:
        self._server = subprocess.Popen(
            ["bash", "-euc", self._in_environment("exec " + text)],
            cwd=self._checkout,
            env=self._environment,
            start_new_session=True,
        )
        wait = f"until curl -sf http://localhost:{self._port}/health; do kill -0 {self._server.pid}; sleep 0.2; done"
        self._run(["bash", "-euc", wait])

    def _in_environment(self, text: str) -> str:
        return text if ".venv/bin/activate" in text else f". .venv/bin/activate\n{text}"

    def _run(self, command: list[str]) -> None:
        result = subprocess.run(
            command, cwd=self._checkout, env=self._environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command[-1]}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"

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


@pytest.mark.timeout(600)
def test_every_command_works(reader: Reader, checkout: Path) -> None:
    assert len(SNIPPETS) == 8
    for snippet in SNIPPETS:
        reader.run(snippet)
    assert (checkout / "demo_output" / "index.html").exists()
    for name in ("speech.wav", "answer.wav", "streamed.wav"):
        with wave.open(str(checkout / name)) as file:
            assert file.getframerate() == 24_000
    assert Image.open(checkout / "painting.png").size == (96, 96)
