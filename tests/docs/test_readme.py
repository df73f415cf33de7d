# SPDX-License-Identifier: Apache-2.0
"""Runs each Python program of the README alone, as a reader who copies it does, with small models."""

import os
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.pages import ROOT, Snippet, snippets
from tests.examples.running import read_wav
from tests.forked_programs import ForkedProgram
from tests.servers import RunningServer

GROUP = "server"
pytestmark = pytest.mark.slow

PROGRAMS = snippets("python", pages=[ROOT / "README.md"])
SMALLER = {
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "shapes",
    "Qwen/Qwen-Image": "shapes-painter",
    '"height": 768, "width": 1024': '"height": 96, "width": 96',
}


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs_alone(
    program: Snippet, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = program.text
    if "localhost:8000" in text:
        server: RunningServer = request.getfixturevalue("omni_server")
        text = text.replace("http://localhost:8000", server.url).replace(next(iter(SMALLER)), server.model)
    for published, small in SMALLER.items():
        text = text.replace(published, small)
    for name in [name for name in os.environ if name.startswith("VLLM_")]:  # that other tests of this process have set
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    script, log = tmp_path / "program.py", tmp_path / "output.txt"
    script.write_text(text)
    code = ForkedProgram(script, [], log).wait()
    output = log.read_text()
    assert code == 0, f"{text}\n{output[-6000:]}"
    if "lighthouse.png" in text:
        assert Image.open(tmp_path / "lighthouse.png").size == (96, 96)
    elif "answer.wav" in text:
        assert output.strip() and read_wav(tmp_path / "answer.wav").size
    else:
        assert "torch.Size([" in output


def test_the_readme_has_programs() -> None:
    assert len(PROGRAMS) >= 3
