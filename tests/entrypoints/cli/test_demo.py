# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo` notices a model that does it wrong. That all is right is tested with the installed wheel."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.entrypoints.cli.conftest import Run
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli import demo

pytestmark = pytest.mark.slow


def test_a_wrong_result_is_named_and_is_the_exit_code(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "painter"
    shutil.copytree(find_checkpoint("shapes-painter"), broken)
    (file,) = broken.glob("transformer/*.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in load_file(file).items()}, file)
    monkeypatch.setattr(demo, "PAINTER", str(broken))
    result = run("demo", tmp_path / "output", "--seed", 1)
    assert result.code == 1
    assert "painting WRONG: its pixels show" in result.out and "wrong; see" in result.out
    page = (tmp_path / "output" / "index.html").read_text()
    assert "The painting: <span class=wrong>wrong</span>" in page
