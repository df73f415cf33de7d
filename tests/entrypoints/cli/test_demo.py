# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo` notices a model that does it wrong. That all is right is tested with the quickstart."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    monkeypatch.setattr(demo, "PAINTER", str(broken))
    with pytest.raises(SystemExit) as ended:
        demo.run_demo([str(tmp_path / "output"), "--seed", "1"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "painting WRONG: its pixels show" in out and "wrong; see" in out
    page = (tmp_path / "output" / "index.html").read_text()
    assert "The painting: <span class=wrong>wrong</span>" in page
