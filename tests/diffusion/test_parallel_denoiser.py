# SPDX-License-Identifier: Apache-2.0
"""Runs `parallel_denoiser_cases.py` in a process of its own.

A process can be in one group of torch.distributed only, and vLLM's engines in other tests have made one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("parallel_denoiser_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 36 cases
def test_a_denoiser_in_several_processes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:]
