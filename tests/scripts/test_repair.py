# SPDX-License-Identifier: Apache-2.0
"""Each repair is applied only if the import is broken."""

import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"

BROKEN_TORCHVISION = """
import torch
for operator in ("nms", "qnms"):  # as torchvision does: this raises where the operator has no schema
    torch.library.register_fake(f"torchvision::{operator}")(lambda dets, scores, threshold: dets)
"""


@pytest.mark.parametrize("times", [0, 2])
def test_the_shim_repairs_a_broken_torchvision_and_can_be_installed_twice(tmp_path, times):
    (tmp_path / "torchvision.py").write_text(BROKEN_TORCHVISION)
    shutil.copy(SCRIPTS / "torchvision_ops.py", tmp_path)
    (tmp_path / "torchvision_ops.pth").write_text("import torchvision_ops; torchvision_ops.install()\n")
    code = f"""
import site, sys
sys.path[:0] = [{str(tmp_path)!r}]
for _ in range({times}):
    site.addsitedir({str(tmp_path)!r})
sys.path.append({sysconfig.get_path("purelib")!r})  # torch; without its .pth files
assert "torch" not in sys.modules
import torchvision
"""
    # -S: the site-packages of this environment may hold the repair already
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode == 0) == (times > 0), result.stderr


@pytest.fixture
def repair():
    """The script's functions; `errors` are the results of its imports, in order."""
    names = runpy.run_path(str(SCRIPTS / "repair.py"))
    namespace = names["main"].__globals__
    errors: list[str | None] = []
    namespace["import_error"] = lambda module: errors.pop(0)
    namespace["find_spec"] = lambda module: object()
    return SimpleNamespace(**names, errors=errors, namespace=namespace)


def test_a_torchvision_that_imports_loses_an_earlier_repair(repair, tmp_path):
    (tmp_path / "torchvision_ops.pth").touch()
    repair.errors.append(None)
    repair.repair_torchvision(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_torchvision_gets_the_shim(repair, tmp_path, capsys):
    repair.errors += ["operator torchvision::nms does not exist", None]
    repair.repair_torchvision(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"torchvision_ops.py", "torchvision_ops.pth"}
    assert (tmp_path / "torchvision_ops.pth").read_text() == "import torchvision_ops; torchvision_ops.install()\n"
    assert "repaired" in capsys.readouterr().out


def test_another_error_of_torchvision_stops_the_set_up(repair, tmp_path):
    repair.errors += ["first", "ImportError: something else"]
    with pytest.raises(SystemExit, match="something else"):
        repair.repair_torchvision(tmp_path)


@pytest.mark.parametrize(("error", "removed"), [(None, False), ("OSError: libcudart.so.13", True)])
def test_an_optional_module_is_removed_only_if_it_is_broken(repair, monkeypatch, capsys, error, removed):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    repair.errors.append(error)
    repair.remove_if_broken("torchaudio")
    assert [command[-3:] for command in commands] == ([["--quiet", "--yes", "torchaudio"]] if removed else [])
    assert ("removing it" in capsys.readouterr().out) == removed


def test_a_failed_import_returns_its_output():
    import_error = runpy.run_path(str(SCRIPTS / "repair.py"))["import_error"]
    assert import_error("json") is None
    assert "No module named 'no_such_module'" in import_error("no_such_module")
