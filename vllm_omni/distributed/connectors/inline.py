# SPDX-License-Identifier: Apache-2.0
"""Small payloads, carried in the control message itself."""

import itertools

from vllm_omni.distributed.connectors.base import Connector, Receiver
from vllm_omni.distributed.messages import Frames, InlineRef

_ALIGNMENT = 16  # of tensors in a bytearray


class InlineConnector(Connector, Receiver[InlineRef]):
    """Sends the buffers as one frame, which follows the control message."""

    def put(self, buffers: Frames) -> tuple[InlineRef, Frames]:
        # Copied, because the socket sends later and a tensor's memory may be written to by then.
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        padded = zip(buffers, (bytes(-size % _ALIGNMENT) for size in sizes), strict=True)
        return InlineRef(sizes=sizes), [b"".join(itertools.chain.from_iterable(padded))]

    def get(self, ref: InlineRef, frames: list[memoryview]) -> list[memoryview]:
        # Copied into writable memory: received frames are read-only, and tensors alias these buffers.
        view = memoryview(bytearray().join(frames))
        buffers, offset = [], 0
        for size in ref.sizes:
            buffers.append(view[offset : offset + size])
            offset += -size % _ALIGNMENT + size
        return buffers

    def discard(self, ref: InlineRef) -> None:
        pass
