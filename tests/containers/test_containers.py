# SPDX-License-Identifier: Apache-2.0
"""A small run of two containers with one /dev/shm; `python -m tests.containers` is the large one."""

from pathlib import Path

import pytest

from tests.containers.namespaces import why_not
from tests.forked_programs import ForkedProgram

pytestmark = pytest.mark.slow


def test_containers_remove_only_what_dead_processes_left(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    output = tmp_path / "output"
    code = ForkedProgram(Path(__file__).with_name("__main__.py"), ["--seconds", "5"], output).wait()
    print(output.read_text())
    assert code == 0, output.read_text()
