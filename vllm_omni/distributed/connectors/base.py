# SPDX-License-Identifier: Apache-2.0
"""The two ends of a payload's path; the connector of small payloads, which the control message itself carries."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from vllm.utils.math_utils import round_up

from vllm_omni.distributed.messages import Frames, InlineRef, NetworkRef, PayloadRef, SharedMemoryRef

Ref = TypeVar("Ref", InlineRef, SharedMemoryRef, NetworkRef)

ALIGNMENT = 16
"""Of tensors in a bytearray."""


class Connector(ABC):
    """Sends payloads. The receiver of each calls exactly one of `Receiver.get` and `Receiver.discard`."""

    @abstractmethod
    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        """Makes the buffers available to the receiver.

        Returns:
            The reference that the control message carries, and the frames that must follow that message.

        Raises:
            OSError: There is no room for the payload.
        """

    @abstractmethod
    def remove_unread(self) -> None:
        """Removes the payloads that were not received: the receiver's process has died."""


class Receiver(ABC, Generic[Ref]):
    """Reads payloads with one type of reference."""

    @abstractmethod
    def get(self, ref: Ref, frames: list[memoryview]) -> list[memoryview]:
        """The payload's buffers. They stay valid as long as a view of them exists.

        Raises:
            OSError: The payload is gone.
            ValueError: The reference is wrong.
        """

    @abstractmethod
    def discard(self, ref: Ref) -> None:
        """Releases a payload that will not be read."""


class InlineConnector(Connector, Receiver[InlineRef]):
    """Sends the buffers as one frame, which follows the control message."""

    def put(self, buffers: Frames) -> tuple[InlineRef, Frames]:
        # Copied, because the socket sends later and a tensor's memory may be written to by then.
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        return InlineRef(sizes=sizes), [b"".join(padded(buffers))]

    def remove_unread(self) -> None:
        pass

    def get(self, ref: InlineRef, frames: list[memoryview]) -> list[memoryview]:
        # Copied into writable memory: received frames are read-only, and tensors alias these buffers.
        return split(memoryview(bytearray().join(frames)), ref.sizes, ALIGNMENT)

    def discard(self, ref: InlineRef) -> None:
        pass


def padded(buffers: Frames) -> Iterator[bytes | bytearray | memoryview]:
    """The buffers, each with what aligns the next one behind it."""
    for buffer in buffers:
        yield from (buffer, bytes(-memoryview(buffer).nbytes % ALIGNMENT))


def split(memory: memoryview, sizes: Sequence[int], alignment: int) -> list[memoryview]:
    """Buffers of these sizes, one after the other, each from a multiple of `alignment` on."""
    starts = itertools.accumulate((round_up(size, alignment) for size in sizes), initial=0)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
