# SPDX-License-Identifier: Apache-2.0
"""Large payloads on one machine, handed over in shared memory.

A payload is one file in the pipeline's run directory, which lies on a memory file system. The sender writes it once;
the receiver maps it, unlinks it at once and reads it in place, so no name outlives the hand-over and the memory is
freed with the last tensor that looks at it.
"""

import itertools
import mmap
import os
from pathlib import Path

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.orchestrator.messages import Frames, PayloadRef

_ALIGNMENT = 64


def _aligned(size: int) -> int:
    return -size % _ALIGNMENT + size


class SharedMemoryConnector(Connector):
    """Writes payloads to `directory` under names that start with `prefix`, unique to the sender."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix
        self._counter = itertools.count()

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        path = str(self._directory / f"{self._prefix}-{next(self._counter)}")
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserve the pages now: a full file system is an error here, not a SIGBUS while copying.
            os.posix_fallocate(fd, 0, max(1, sum(map(_aligned, sizes))))
            offset = 0
            for buffer, size in zip(buffers, sizes, strict=True):
                _write(fd, memoryview(buffer).cast("B"), offset)
                offset += _aligned(size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return PayloadRef(sizes=sizes, path=path), ()

    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        assert ref.path is not None
        fd = os.open(ref.path, os.O_RDWR)
        try:
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
        os.unlink(ref.path)


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
