# SPDX-License-Identifier: Apache-2.0
"""Large payloads on one machine, handed over in shared memory.

A payload is one file in the pipeline's run directory, which lies on a memory file system. The sender writes it once;
the receiver maps it, unlinks it at once and reads it in place, so no name outlives the hand-over. The memory is the
sender's again, or the system's, with the last tensor that looks at it: see `segment_pool`.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
from pathlib import Path

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.distributed.connectors.segment_pool import SegmentPool
from vllm_omni.distributed.messages import Frames, PayloadRef

_ALIGNMENT = 64


def _aligned(size: int) -> int:
    return -size % _ALIGNMENT + size


class SharedMemoryConnector(Connector):
    """Writes payloads to `directory` under names that start with `prefix`, unique to the sender."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._pool = SegmentPool(directory, f"pool-{prefix}")
        self._path = str(directory / prefix)
        self._counter = itertools.count()

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        sizes = [view.nbytes for view in views]
        segment = self._pool.take(max(1, sum(map(_aligned, sizes))))
        offset = 0
        for view, size in zip(views, sizes, strict=True):
            segment.write(view, offset)
            offset += _aligned(size)
        path = f"{self._path}-{next(self._counter)}"
        segment.publish(path)
        return PayloadRef(sizes=sizes, path=path), ()

    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        assert ref.path is not None
        fd = os.open(ref.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The mapping keeps a duplicate of the descriptor, and with it the lock, until nobody has a view of it.
            fcntl.flock(fd, fcntl.LOCK_SH)
            # A private mapping: readers may write to their tensors.
            view = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE))
        finally:
            os.close(fd)
            os.unlink(ref.path)
        buffers, offset = [], 0
        for size in ref.sizes:
            buffers.append(view[offset : offset + size])
            offset += _aligned(size)
        return buffers

    def discard(self, ref: PayloadRef) -> None:
        assert ref.path is not None
        with contextlib.suppress(FileNotFoundError):  # It was removed with the stage that was to read it.
            os.unlink(ref.path)
