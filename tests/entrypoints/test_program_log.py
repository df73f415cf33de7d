# SPDX-License-Identifier: Apache-2.0
"""What a program prints that configures no logging, as its user sees it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
from vllm_omni import ARSegmentEvent, OmniLLM

with OmniLLM("shapes") as omni:
    (output,) = omni.chat([{"role": "user", "content": "Say: a red circle"}], use_tqdm=False, modalities=["text"])
print(output.outputs[0].text)
"""
LINE = r"INFO \d\d-\d\d \d\d:\d\d:\d\d "


def run(folder: Path, **variables: str) -> tuple[str, str]:
    """Runs the program in a user's shell; returns its output and its log."""
    names = [name for name in os.environ if name.startswith("VLLM_")]
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout, result.stderr


def test_one_line_for_each_stage(tmp_path: Path) -> None:
    out, log = run(tmp_path)
    assert out == "A red circle.\n"
    lines = log.removeprefix("importing vLLM ...\n").splitlines()  # on a slow machine
    assert all(re.match(LINE, line) for line in lines), log
    texts = [re.sub(LINE, "", line) for line in lines]
    texts = [text for text in texts if not text.startswith("still loading after ")]  # on a slow machine
    assert texts[0] == "starting stage 0 (thinker), stage 1 (talker), stage 2 (code2wav)"
    ready = sorted(re.sub(r"[\d.]+ s$", "", text) for text in texts[1:])
    assert ready == [f"stage {i} ({name}): ready after " for i, name in enumerate(("thinker", "talker", "code2wav"))]


def test_vllms_own_lines_are_a_variable_away(tmp_path: Path) -> None:
    out, log = run(tmp_path, VLLM_LOGGING_LEVEL="INFO")
    assert out == "A red circle.\n" and "Starting to load model" in log and "(thinker pid=" in log
