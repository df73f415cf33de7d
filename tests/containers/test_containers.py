# SPDX-License-Identifier: Apache-2.0
"""A small run of two containers with one /dev/shm; `python -m tests.containers` is the large one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.namespaces import why_not

pytestmark = pytest.mark.slow


def test_containers_remove_only_what_dead_processes_left() -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.containers", "--seconds", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0, ran.stdout
