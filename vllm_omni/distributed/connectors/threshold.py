# SPDX-License-Identifier: Apache-2.0
"""The connector that a stage uses: inline for small payloads, shared memory for large ones."""

from pathlib import Path

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.distributed.connectors.inline import InlineConnector
from vllm_omni.distributed.connectors.shared_memory import SharedMemoryConnector
from vllm_omni.orchestrator.messages import Frames, PayloadRef


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

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        return (self._inline if size < self._threshold else self._shared_memory).put(buffers)

    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        return self._of(ref).get(ref, frames)

    def discard(self, ref: PayloadRef) -> None:
        self._of(ref).discard(ref)

    def _of(self, ref: PayloadRef) -> Connector:
        return self._inline if ref.path is None else self._shared_memory
