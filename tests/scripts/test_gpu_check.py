# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_check.sh` with a driver and an environment that are not there: what it says, runs and reports."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
DRIVER = """#!/bin/sh
case "$*" in
*nounits*) echo 81559 ;;
*query-gpu=name*) echo "NVIDIA Test" ;;
*) echo "GPU 0: a test" ;;
esac
"""
PYTHON = """#!/bin/sh
echo "ran $*"
echo $* >> "$RAN"
case "$*" in
*set_up.py*) mkdir -p "$2/bin" && cp "$0" "$2/bin/python" && touch "$3" ;;
*gpu_bundle.py*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*"$HANGS"*) exec sleep 600 ;;
*"$FAILS"*) exit 3 ;;
esac
"""


@dataclass
class Machine:
    """A checkout on a machine with a driver, and a Python that only notes what it is asked to run."""

    folder: Path

    def check(self, *arguments: str, fails: str = "nothing", hangs: str = "nothing", limit_min: str = "25") -> str:
        """Runs the script; returns its output and status."""
        environment = os.environ | {
            "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}", "VENV": str(self.folder / "venv"), "FAILS": fails,
            "HANGS": hangs, "PYTHON": "python3", "RAN": str(self.folder / "ran"), "LIMIT_MIN": limit_min,
        }  # fmt: skip
        command = [self.folder / "checkout" / "scripts" / "gpu_check.sh", *arguments]
        result = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return f"{result.stdout}status {result.returncode}"

    @property
    def ran(self) -> list[str]:
        """The commands since the last look."""
        path = self.folder / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    @property
    def report(self) -> str:
        (path,) = (self.folder / "checkout" / "docs" / "gpu").glob("*_NVIDIA-Test.md")
        return path.read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name, text in {"nvidia-smi": DRIVER, "python3": PYTHON}.items():
        tool = tmp_path / "tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
    for folder in ("scripts", "docs"):
        (tmp_path / "checkout" / folder).mkdir(parents=True)
    (tmp_path / "checkout" / "docs" / "devices.md").write_text("Reports:\n")
    shutil.copy(SCRIPT, tmp_path / "checkout" / "scripts")
    return Machine(tmp_path)


def test_without_a_gpu_it_says_so_and_writes_nothing(machine: Machine) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    (machine.folder / "tools" / "nvidia-smi").unlink()
    output = machine.check()
    assert "did not find" in output and "no nvidia-smi on PATH" in output and output.endswith("status 2")
    assert machine.ran == [] and not (machine.folder / "checkout" / "docs" / "gpu").exists()


def test_the_report_has_every_part_and_a_second_run_repeats_none(machine: Machine) -> None:
    output = machine.check()
    assert output.endswith("status 0"), output
    rows = [line for line in machine.report.splitlines() if line.startswith("| ") and "result" not in line]
    assert len(rows) == 16 and all("passed (" in row for row in rows)
    assert "ran -m pytest --timeout=300 -q" in machine.report and "NVIDIA Test" in machine.report
    assert len(machine.ran) == 16
    assert machine.check().count("passed (") == 16 and machine.ran == []
    link = r"Reports:\n\n- \[(\d+-\d+-\d+_NVIDIA-Test)\]\(gpu/\1\.md\)\n"
    assert re.fullmatch(link, (machine.folder / "checkout" / "docs" / "devices.md").read_text()), "one link"
    assert machine.check("--again").endswith("status 0") and len(machine.ran) == 16


def test_a_part_that_fails_is_reported_and_run_again(machine: Machine) -> None:
    output = machine.check(fails="test_diffusion")
    assert output.endswith("status 1") and "\nDiffusion: FAILED with status 3 (" in output
    assert "| Diffusion | FAILED with status 3 (" in machine.report and "| bfloat16 | passed (" in machine.report
    assert len(machine.ran) == 16
    assert machine.check().endswith("status 0")
    assert machine.ran == ["-m pytest --timeout=300 -q -p no:cacheprovider tests/gpu/test_diffusion.py"]
    assert "FAILED" not in machine.report


def test_results_stand_while_a_part_hangs(machine: Machine) -> None:
    """The limit is that of the whole run, in minutes, which the shell takes as a number."""
    script = machine.folder / "checkout" / "scripts" / "gpu_check.sh"
    script.write_text(script.read_text().replace("part text 120", "part text 1"))
    output = machine.check(hangs="test_text.py")
    assert "\nText: FAILED, stopped after 1 s (" in output and "| Text | FAILED, stopped after 1 s (" in machine.report
    assert "| Qwen3-Omni, eager | passed (" in machine.report


def test_what_the_time_does_not_suffice_for_is_named(machine: Machine) -> None:
    output = machine.check(limit_min="0")
    assert output.endswith("status 1") and "Installation: not run, no time was left" in output


def test_nothing_else_runs_without_the_cuda_build(machine: Machine) -> None:
    output = machine.check(fails="is_cuda()")
    assert "Device: FAILED" in output and "Text" not in output and output.endswith("status 1")


def test_it_installs_from_a_bundle(machine: Machine) -> None:
    bundle = machine.folder / "bundle"
    assert f"a bundle in {bundle}" in machine.check("--bundle", str(bundle))
    bundle.mkdir()
    (bundle / "bundle.json").touch()
    assert machine.check("--bundle", str(bundle)).endswith("status 0")
    assert machine.ran[0] == f"scripts/gpu_bundle.py install {bundle} {machine.folder / 'venv'}"


def test_an_unknown_option_is_named(machine: Machine) -> None:
    assert "there is no option --agian" in machine.check("--agian")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_complaints() -> None:
    result = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert result.stdout == ""
