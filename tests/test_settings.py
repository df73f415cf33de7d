# SPDX-License-Identifier: Apache-2.0
"""pytest, ruff and mypy use the settings in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import group_of

ROOT = Path(__file__).parents[1]


def test_pytest_reads_pyproject(pytestconfig):
    assert pytestconfig.inipath == ROOT / "pyproject.toml"
    assert float(pytestconfig.getini("timeout")) == 300
    assert pytestconfig.pluginmanager.has_plugin("timeout"), "pytest-timeout is missing: nothing bounds a test"
    assert pytestconfig.option.importmode == "importlib"
    assert pytestconfig.getini("xfail_strict") is True


def test_files_that_share_a_server_or_a_pipeline_declare_their_group(request):
    """By the fixtures of all tests of this run. Without `GROUP = "..."` each process would start its own."""
    undeclared = set()
    for item in request.session.items:
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            is_shared = definitions[-1].scope == "session" and name.endswith(("_server", "_app", "_llm"))
            file = item.nodeid.split("::")[0]
            if is_shared and group_of(ROOT, file) == file:
                undeclared.add((file, name))
    assert undeclared == set()


def test_no_other_file_has_settings():
    others = ["pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "ruff.toml", ".ruff.toml"]
    others += ["mypy.ini", ".mypy.ini", ".flake8", ".coveragerc", "setup.cfg", "setup.py"]
    assert [name for name in others if (ROOT / name).exists()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target, marked", [("test", "not slow"), ("test-slow", "slow")])
def test_make_sets_omp_num_threads_and_selects_tests(tmp_path, target, marked):
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready-cpu").touch()
    (tmp_path / ".ready").touch()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "threads=$OMP_NUM_THREADS"; printf "<%s>" "$@"\n')
    python.chmod(0o755)
    output = subprocess.run(
        ["make", "-C", ROOT, target], env={**clean, "VENV": str(tmp_path), "CLIENTS_VENV": str(tmp_path)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"threads=1\n<scripts/run_tests.py><run><{target}>" in output and f"<-m><{marked}>" in output


def test_ruff_reads_pyproject():
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("the extra lint is not installed")
    found = subprocess.run(
        [ruff, "check", "--no-cache", "--output-format=concise", "--stdin-filename", ROOT / "vllm_omni" / "x.py", "-"],
        input=f"def f(x=[]):\n    return '{'x' * 90}'\n\n\ny = '{'x' * 120}'\n",
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "B006" in found and found.count("E501") == 1


def test_mypy_reads_pyproject(tmp_path):
    pytest.importorskip("mypy", reason="the extra lint is not installed")
    module = tmp_path / "untyped.py"
    module.write_text("def f(x):\n    return x\n")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "no-untyped-def" in found
