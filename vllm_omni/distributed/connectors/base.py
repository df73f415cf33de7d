# SPDX-License-Identifier: Apache-2.0
"""The two ends of a payload's path."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from vllm_omni.distributed.messages import Frames, InlineRef, PayloadRef, SharedMemoryRef

Ref = TypeVar("Ref", InlineRef, SharedMemoryRef)


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


class Receiver(ABC, Generic[Ref]):
    """Reads payloads with one type of reference."""

    @abstractmethod
    def get(self, ref: Ref, frames: list[memoryview]) -> list[memoryview]:
        """The payload's buffers. They stay valid as long as a view of them exists."""

    @abstractmethod
    def discard(self, ref: Ref) -> None:
        """Releases a payload that will not be read."""
