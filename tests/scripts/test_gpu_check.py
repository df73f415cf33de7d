# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_check.sh` with a driver and an environment that are not there: what it says, runs and reports."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
DRIVER = """#!/bin/sh
case "$*" in
*nounits*) echo 81559 ;;
*) echo "GPU 0: a test" ;;
esac
"""
PYTHON = """#!/bin/sh
echo "ran $*"
case "$*" in
*set_up.py*) mkdir -p "$2/bin" && cp "$0" "$2/bin/python" ;;
*"$FAILS"*) exit 3 ;;
esac
"""


def check(tmp_path: Path, has_driver: bool = True, fails: str = "nothing") -> tuple[int, str, str]:
    """The exit status, stderr, and the report."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"nvidia-smi": DRIVER, "python3": PYTHON}.items():
        if has_driver or name != "nvidia-smi":
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    if not has_driver and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    report = tmp_path / "report.md"
    path = f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "VENV": str(tmp_path / "venv"), "FAILS": fails, "PYTHON": "python3"}
    result = subprocess.run([SCRIPT, report], env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr, report.read_text() if report.exists() else ""


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    status, stderr, report = check(tmp_path, has_driver=False)
    assert (status, report) == (2, "")
    assert "did not find" in stderr and "no nvidia-smi on PATH" in stderr


def test_the_report_has_every_step(tmp_path: Path) -> None:
    status, stderr, report = check(tmp_path)
    titles = [line for line in report.splitlines() if line.startswith("## ")]
    assert status == 0, stderr
    assert len(titles) == 7 and all(": passed (" in title for title in titles)
    assert "ran -m pytest -m gpu" in report and "GPU 0: a test" in report


def test_a_step_that_fails_is_reported_and_others_run(tmp_path: Path) -> None:
    status, _, report = check(tmp_path, fails="-m pytest")
    assert status == 1
    assert "## Tests: FAILED with status 3" in report and "## Diffusion: passed" in report


def test_nothing_runs_without_the_cuda_build(tmp_path: Path) -> None:
    status, _, report = check(tmp_path, fails="is_cuda()")
    assert status == 1
    assert "## Device: FAILED" in report and "## Tests" not in report


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_complaints() -> None:
    result = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert result.stdout == ""
