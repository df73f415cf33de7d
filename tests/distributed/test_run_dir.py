# SPDX-License-Identifier: Apache-2.0
"""When run directories are removed, and which files of a dead stage."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers.namespaces import UNSHARE, why_not
from vllm_omni.distributed import run_dir as run_dirs
from vllm_omni.distributed.connectors import SharedMemoryConnector, remove_payloads, remove_segments
from vllm_omni.distributed.connectors.shared_memory import payload_prefix
from vllm_omni.distributed.locked_folder import hold, remove_leftovers
from vllm_omni.distributed.run_dir import PREFIX, RunDir

NAMES = {
    "to it": f"{payload_prefix(7, 0, 1)}-0",
    "to it from the orchestrator": f"{payload_prefix(6, -1, 1)}-3",
    "its own": f"{payload_prefix(8, 1, 2)}-0",
    "its own to the orchestrator": f"{payload_prefix(8, 1, -1)}-0",
    "its segment": f"pool-{payload_prefix(8, 1, 2)}-0",
    "a segment for it": f"pool-{payload_prefix(7, 0, 1)}-0",
    "of others": f"{payload_prefix(7, 0, 11)}-0",
    "to the orchestrator": f"{payload_prefix(9, 11, -1)}-0",
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A parent directory for this test, instead of the one that all processes of the machine share."""
    with tempfile.TemporaryDirectory() as path:  # `tmp_path` may be too long for sockets.
        monkeypatch.setattr(run_dirs, "MEMORY_FILE_SYSTEM", Path(path))
        yield Path(path)


@pytest.fixture
def run_dir(memory: Path) -> Iterator[RunDir]:
    run_dir = RunDir()
    for name in NAMES.values():
        (run_dir.path / name).touch()
    yield run_dir
    run_dir.remove()


def left(run_dir: RunDir) -> set[str]:
    return {what for what, name in NAMES.items() if (run_dir.path / name).exists()}


def test_payloads_of_a_stage_that_restarts(run_dir: RunDir) -> None:
    remove_payloads(run_dir.path, 1)
    assert left(run_dir) == {"its segment", "a segment for it", "of others", "to the orchestrator"}


def test_payloads_that_a_dead_stage_sent_can_be_received(run_dir: RunDir) -> None:
    remove_segments(run_dir.path, 1)
    assert left(run_dir) == NAMES.keys() - {"its segment"}


def test_payloads_to_a_dead_stage_are_removed(run_dir: RunDir) -> None:
    SharedMemoryConnector(run_dir.path, payload_prefix(7, 0, 1), 1).remove_unread()
    assert left(run_dir) == NAMES.keys() - {"to it"}


@contextmanager
def process(memory: Path, work: str) -> Iterator[subprocess.Popen]:
    """A process that does some work in this directory, and then runs until it is killed."""
    code = "import pathlib, sys; from vllm_omni.distributed import locked_folder, run_dir; "
    code += "memory = pathlib.Path(sys.argv[1]); "
    code += f"run_dir.MEMORY_FILE_SYSTEM = memory; result = {work}; print('done', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(memory)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as started:
        try:
            assert started.stdout is not None and started.stdout.readline() == "done\n"
            yield started
        finally:
            started.kill()


def test_a_pipeline_does_not_remove_the_directory_of_another_container(run_dir: RunDir) -> None:
    """Two containers with one /dev/shm: process ids of one are meaningless in the other."""
    if reason := why_not():
        pytest.skip(reason)
    clean = "import sys, pathlib; from vllm_omni.distributed import locked_folder, run_dir; "
    clean += "locked_folder.remove_leftovers(pathlib.Path(sys.argv[1]), run_dir.PREFIX)"
    command = [*UNSHARE, sys.executable, "-c", clean, str(run_dir.path.parent)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert left(run_dir) == NAMES.keys()


def test_files_of_a_killed_pipeline_are_removed_after_its_last_process_ends(memory: Path) -> None:
    with process(memory, "run_dir.RunDir()") as parent:
        (path,) = memory.iterdir()
        with process(memory, "locked_folder.hold(next(memory.iterdir()))") as stage:
            remove_leftovers(memory, PREFIX)
            parent.kill()
            parent.wait()
            remove_leftovers(memory, PREFIX)
            assert path.exists(), "its stage still uses it"
            stage.kill()
            stage.wait()
            remove_leftovers(memory, PREFIX)
            assert not path.exists()


def test_a_directory_that_is_removed_while_it_is_made(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    made: list[str] = []

    def make_late(**where: object) -> str:
        made.append(make(**where))
        if len(made) == 1:
            remove_leftovers(memory, PREFIX)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_late)
    run_dir = RunDir()
    remove_leftovers(memory, PREFIX)
    assert [str(path) for path in memory.iterdir()] == [made[1]] == [str(run_dir.path)]
    run_dir.remove()
    assert list(memory.iterdir()) == []


def test_a_late_cleanup_removes_nothing_new(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened a directory that another cleanup removes, and whose name a new pipeline takes."""
    path = memory / "vllm_omni-run-0"
    path.mkdir()
    lock, owner = fcntl.flock, []

    def lock_late(fd: int, operation: int) -> None:
        if not owner:
            shutil.rmtree(path)
            path.mkdir()
            owner.append(-1)
            owner[0] = hold(path)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    remove_leftovers(memory, PREFIX)
    assert path.exists()
    os.close(owner[0])
    remove_leftovers(memory, PREFIX)
    assert not path.exists()
