# SPDX-License-Identifier: Apache-2.0
"""What commands say about a stage in a Python of its own."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.stage.test_agent_pipeline import WRITER, in_agent
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.cli.doctor_memory import check_model
from vllm_omni.entrypoints.cli.findings import Platform
from vllm_omni.errors import StageConfigError


def write_stages(folder: Path, **runtime: Any) -> Path:
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({"stage_args": [WRITER, in_agent(**runtime)]}))
    return path


def test_commands_say_what_a_stage_runs_in(run: Any, tmp_path: Path) -> None:
    flags = ("--stage-configs-path", str(write_stages(tmp_path)))
    result = run("config", "show", "speech", *flags)
    assert result.code == 0
    shown = (
        f"# runs in: Python {'.'.join(map(str, sys.version_info[:3]))} with numpy {np.__version__} ({sys.executable})"
    )
    assert shown in result.out and f"python: {sys.executable}" in result.out
    *_, findings = check_model(["speech", *flags], Platform("cpu", []))
    (found,) = (finding for finding in findings if finding.subject == "python")
    assert found.message == f"stage 1 (own): {shown.removeprefix('# runs in: ')}"


def test_a_python_that_is_not_there_is_refused_before_anything_starts(run: Any, tmp_path: Path) -> None:
    stages = str(write_stages(tmp_path, python="/nothing"))
    result = run("config", "show", "speech", "--stage-configs-path", stages)
    assert result.code and "stage 1 (own): runtime.python: '/nothing' is no program on this machine" in result.err
    *_, (found,) = check_model(["speech", "--stage-configs-path", stages], Platform("cpu", []))
    assert found.level == "FAIL" and "'/nothing' is no program" in found.message


def test_a_program_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(StageConfigError, match="'/nothing' is no program"):
        OmniLLM("speech", str(write_stages(tmp_path, python="/nothing")))
