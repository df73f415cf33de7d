# SPDX-License-Identifier: Apache-2.0
"""The connector that a stage uses: inline for small payloads, shared memory for large ones while it has room."""

import errno
from pathlib import Path

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.distributed.connectors.inline import InlineConnector
from vllm_omni.distributed.connectors.shared_memory import SharedMemoryConnector
from vllm_omni.distributed.messages import Frames, PayloadRef
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class ThresholdConnector(Connector):
    """Chooses by size when sending, and by what the reference says when receiving."""

    def __init__(self, directory: Path, prefix: str, shm_threshold_bytes: int) -> None:
        """
        Args:
            shm_threshold_bytes: Payloads of at least this size go through shared memory.
        """
        self._inline = InlineConnector()
        self._shared_memory = SharedMemoryConnector(directory, prefix)
        self._threshold = shm_threshold_bytes
        self._directory = directory
        self._has_warned = False

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size >= self._threshold:
            try:
                return self._shared_memory.put(buffers)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._warn(size)
        return self._inline.put(buffers)

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

    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        return self._of(ref).get(ref, frames)

    def discard(self, ref: PayloadRef) -> None:
        self._of(ref).discard(ref)

    def _of(self, ref: PayloadRef) -> Connector:
        return self._inline if ref.path is None else self._shared_memory
