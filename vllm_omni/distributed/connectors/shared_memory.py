# SPDX-License-Identifier: Apache-2.0
"""Large payloads between processes of one machine, in shared memory.

A payload is one file in the pipeline's run directory, which is on a memory file system. The sender writes it once; the
receiver maps it, unlinks it immediately and reads it in place, so its name exists only until it is received. The memory
is released for reuse with the last tensor that refers to it: see `segment_pool`. The names of all files are known here
only, so this file also removes those that dead processes have left.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
from pathlib import Path

from vllm.utils.math_utils import round_up

from vllm_omni.distributed.connectors.base import Connector, InlineConnector, Receiver, split
from vllm_omni.distributed.connectors.segment_pool import SegmentPool
from vllm_omni.distributed.messages import Frames, PayloadRef, SharedMemoryRef
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_ALIGNMENT = 64
_POOL = "pool"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def payload_prefix(pid: int | str, sender: int, receiver: int | str) -> str:
    """The prefix of the names of payloads that a process sends from one stage to another."""
    return f"payload-{pid}-from{sender}-to{receiver}"


def remove_payloads(directory: Path, instance_id: int) -> None:
    """Removes payloads that are never read: those sent to a stage's dead processes, and by them.

    Call it before anything is sent to or by the stage's next process.
    """
    _remove(directory, f"payload-*-to{instance_id}-*")
    _remove(directory, f"{payload_prefix('*', instance_id, '')}*")


def remove_segments(directory: Path, instance_id: int) -> None:
    """Removes the segments that a stage's dead processes kept for reuse.

    Payloads in flight are not affected: they have names of their own.
    """
    _remove(directory, f"{_POOL}-{payload_prefix('*', instance_id, '')}*")


def _remove(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        path.unlink(missing_ok=True)


class SharedMemoryConnector(Connector):
    """Sends small payloads inline, and large ones through shared memory as long as it has room."""

    def __init__(self, directory: Path, prefix: str, threshold_bytes: int) -> None:
        """
        Args:
            directory: Where payloads are written.
            prefix: Of their names; unique to the sender and the receiver.
            threshold_bytes: Payloads of at least this size go through shared memory.
        """
        self._inline = InlineConnector()
        self._pool = SegmentPool(directory, f"{_POOL}-{prefix}")
        self._directory = directory
        self._prefix = prefix
        self._threshold = threshold_bytes
        self._counter = itertools.count()
        self._has_warned = False

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(view.nbytes for view in views)
        if size >= self._threshold:
            try:
                return self._write(views), ()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._warn(size)
        return self._inline.put(buffers)

    def remove_unread(self) -> None:
        _remove(self._directory, f"{self._prefix}-*")

    def _write(self, views: list[memoryview]) -> SharedMemoryRef:
        sizes = [view.nbytes for view in views]
        segment = self._pool.take(max(1, sum(round_up(size, _ALIGNMENT) for size in sizes)))
        offset = 0
        for view, size in zip(views, sizes, strict=True):
            segment.write(view, offset)
            offset += round_up(size, _ALIGNMENT)
        name = f"{self._prefix}-{next(self._counter)}"
        segment.publish(str(self._directory / name))
        return SharedMemoryRef(sizes=sizes, name=name)

    def _warn(self, size: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s has no room for %d bytes: as long as it is full, data passes between stages inside messages, which "
                "is slower. To give it more room: docker run --shm-size=2g (or --ipc=host); elsewhere: mount -o "
                "remount,size=2g /dev/shm",
                self._directory,
                size,
            )


class SharedMemoryReceiver(Receiver[SharedMemoryRef]):
    """Maps the file of a payload, in one directory only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, ref: SharedMemoryRef, frames: list[memoryview]) -> list[memoryview]:
        path = self._path(ref)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # The mapping keeps a duplicate of the descriptor, and with it the lock, until the last view is gone.
            fcntl.flock(fd, fcntl.LOCK_SH)
            # A private mapping: readers may write to their tensors.
            view = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE))
        finally:
            os.close(fd)
            os.unlink(path)
        return split(view, ref.sizes, _ALIGNMENT)

    def discard(self, ref: SharedMemoryRef) -> None:
        # It was removed when its receiver died, or is no payload.
        with contextlib.suppress(FileNotFoundError, ValueError):
            os.unlink(self._path(ref))

    def _path(self, ref: SharedMemoryRef) -> str:
        """Raises `ValueError` for what is not the name of a file in the directory."""
        if ref.name in (".", "..") or os.path.basename(ref.name) != ref.name or not ref.name:
            raise ValueError(f"{ref.name!r} is not the name of a payload")
        return f"{self._directory}/{ref.name}"
