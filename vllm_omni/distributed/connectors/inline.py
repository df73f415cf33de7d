# SPDX-License-Identifier: Apache-2.0
"""Small payloads, carried in the control message itself."""

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.orchestrator.messages import Frames, PayloadRef


class InlineConnector(Connector):
    """Sends the buffers as further frames of the control message."""

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        # Copied, because the socket sends later and a tensor's memory may be written to by then.
        frames = [bytes(buffer) for buffer in buffers]
        return PayloadRef(sizes=[len(frame) for frame in frames]), frames

    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        # Copied into writable memory: received frames are read-only, and tensors alias these buffers.
        return [memoryview(bytearray(frame)) for frame in frames]

    def discard(self, ref: PayloadRef) -> None:
        pass
