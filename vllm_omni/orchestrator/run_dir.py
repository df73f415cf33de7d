# SPDX-License-Identifier: Apache-2.0
"""The directory that holds all that a pipeline has in the file system: its sockets and its payloads in flight.

It lies on a memory file system where there is one, and is removed as a whole, so that nothing can be forgotten.
"""

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "vllm_omni-"
_MEMORY_FILE_SYSTEM = Path("/dev/shm")


class RunDir:
    """Creates the directory, and removes those that killed pipelines left behind."""

    def __init__(self) -> None:
        on_memory = _MEMORY_FILE_SYSTEM.is_dir() and os.access(_MEMORY_FILE_SYSTEM, os.W_OK)
        parent = _MEMORY_FILE_SYSTEM if on_memory else Path(tempfile.gettempdir())
        remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))

    @property
    def orchestrator_address(self) -> str:
        return orchestrator_address(self.path)

    def stage_address(self, stage_id: int, epoch: int) -> str:
        return stage_address(self.path, stage_id, epoch)

    def remove_payloads(self, stage_id: int) -> None:
        """Removes what nobody will ever read: what a stage's dead processes were sent, and what they sent themselves.

        To be called before anything is sent to the stage's next process, or by it.
        """
        for pattern in (f"payload-*-to{stage_id}-*", f"{payload_prefix('*', stage_id, '')}*"):
            self._remove(pattern)

    def remove_segments(self, stage_id: int) -> None:
        """Removes the memory that a stage's dead processes kept for further payloads.

        Not those payloads that are on their way: they have names of their own.
        """
        self._remove(f"pool-{payload_prefix('*', stage_id, '')}*")

    def _remove(self, pattern: str) -> None:
        for path in self.path.glob(pattern):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def orchestrator_address(path: Path) -> str:
    return f"ipc://{path}/orchestrator.sock"


def stage_address(path: Path, stage_id: int, epoch: int) -> str:
    """Each process of a stage has an address of its own, so that nothing meant for a dead one reaches the next."""
    return f"ipc://{path}/stage-{stage_id}.{epoch}.sock"


def payload_prefix(pid: int | str, sender: int, receiver: int | str) -> str:
    """How the names begin of the payloads that a process sends from one stage to another."""
    return f"payload-{pid}-from{sender}-to{receiver}"


def remove_unread(path: Path, pid: int, sender: int, receiver: int) -> None:
    """Removes the payloads that a process sent from one stage to another, and that this has not taken."""
    for payload in path.glob(f"{payload_prefix(pid, sender, receiver)}-*"):
        payload.unlink(missing_ok=True)


def remove_leftovers(parent: Path) -> None:
    """Removes the directories under `parent` whose process is gone."""
    for path in parent.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
