# SPDX-License-Identifier: Apache-2.0
"""The directory of all files of a pipeline: its sockets and its payloads in flight.

It is on a memory file system where there is one. Each process of the pipeline holds it, see `locked_folder`.
"""

import errno
import os
import tempfile
from pathlib import Path

from vllm_omni.distributed.locked_folder import LockedFolder

PREFIX = "vllm_omni-run-"
MEMORY_FILE_SYSTEM = Path("/dev/shm")
"""Where run directories are, if it can be written."""
_MAX_SOCKET_PATH = 107
"""Bytes: `sun_path` of `sockaddr_un`, without its terminator."""
_RANDOM_PART, _LONGEST_SOCKET = "12345678", "stage-1000.100000.sock"


class RunDir:
    """Creates the directory, and removes those that killed pipelines have left."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: The directory cannot be created, or its path is too long for sockets.
        """
        parent = _memory_or_temporary()
        _check_length(parent)
        self._folder = LockedFolder(parent, PREFIX)
        self.path = self._folder.path

    def remove(self) -> None:
        self._folder.remove()


def orchestrator_address(path: Path) -> str:
    return f"ipc://{path}/orchestrator.sock"


def stage_address(path: Path, instance_id: int, epoch: int) -> str:
    """Each process of a replica has an address of its own, so that messages for a dead one do not reach the next."""
    return f"ipc://{path}/stage-{instance_id}.{epoch}.sock"


def _memory_or_temporary() -> Path:
    if MEMORY_FILE_SYSTEM.is_dir() and os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        return MEMORY_FILE_SYSTEM
    return Path(tempfile.gettempdir())


def _check_length(parent: Path) -> None:
    path = parent / f"{PREFIX}{_RANDOM_PART}" / _LONGEST_SOCKET
    excess = len(os.fsencode(path)) - _MAX_SOCKET_PATH
    if excess > 0:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the paths of sockets in {parent} would exceed the system's limit of {_MAX_SOCKET_PATH} bytes "
            f"by {excess}; set TMPDIR to a shorter path, or make {MEMORY_FILE_SYSTEM} writable",
        )
