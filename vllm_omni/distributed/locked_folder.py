# SPDX-License-Identifier: Apache-2.0
"""A folder of a process or of several, which is removed as a whole; the next process removes those of killed ones. And
the user's cache, in which processes make things one at a time.

Each process that uses it holds a shared lock on it until it ends. So a folder that can be locked exclusively is unused.
Containers may share a file system, and process ids of one are meaningless in another; a lock is valid in all of them,
and the kernel releases it however its holder ends.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_omni.errors import PipelineStartError


class LockedFolder:
    """Creates the folder, and removes those that killed processes have left."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """
        Args:
            prefix: Of the names of such folders in `parent`.

        Raises:
            OSError: The folder cannot be created.
        """
        remove_leftovers(parent, prefix)
        self.path, self._lock = _create(parent, prefix)

    def fileno(self) -> int:
        """The descriptor of the lock: a child that inherits it holds the lock, too."""
        return self._lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def hold(path: Path) -> int:
    """Locks a folder so that it is not removed as unused; called once by each process that uses it.

    Returns:
        A file descriptor that holds the lock, and that stays open for the life of the process.

    Raises:
        OSError: The folder is gone.
    """
    return _lock(path, fcntl.LOCK_SH)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes the folders in `parent` whose names begin with `prefix`, and whose processes have all ended."""
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with contextlib.suppress(OSError):  # It is in use, owned by another user, or removed already.
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _create(parent: Path, prefix: str) -> tuple[Path, int]:
    """Makes a folder and locks it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            return path, hold(path)
        except FileNotFoundError:
            continue  # Another process removed it before it was locked.
        except BaseException:
            path.rmdir()
            raise


def _lock(path: Path, operation: int) -> int:
    """Opens and locks a folder; `path` refers to it as long as the lock is held.

    Raises:
        FileNotFoundError: It was removed, perhaps by the process that had locked it before.
        BlockingIOError: It is locked, and `operation` is non-blocking.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, operation)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path} was replaced")
    except BaseException:
        os.close(fd)
        raise
    return fd


def user_cache(name: str, what: str) -> Path:
    """`~/.cache/vllm_omni/NAME`, or the same below `XDG_CACHE_HOME`.

    Args:
        what: Is kept there, for the message.

    Raises:
        PipelineStartError: The user has no home folder, as some in containers.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise PipelineStartError(f"this user has no home folder for {what}; set HOME, or XDG_CACHE_HOME")
    return Path(cache) / "vllm_omni" / name


@contextlib.contextmanager
def alone(path: Path, what: str, logger: logging.Logger) -> Iterator[None]:
    """Only one process at a time holds this file; the others wait.

    Args:
        what: It does, for the log: `converts weights`.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process that %s", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
