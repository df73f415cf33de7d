# SPDX-License-Identifier: Apache-2.0
"""What carries a payload from the stage that made it to the stage that reads it.

A connector moves buffers. It knows neither what is in them nor who sends the control message that announces them.
"""

from abc import ABC, abstractmethod

from vllm_omni.distributed.messages import Frames, PayloadRef


class Connector(ABC):
    """One way to move a payload. The sender calls `put`, the receiver exactly one of `get` and `discard`."""

    @abstractmethod
    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        """Makes the buffers available to the receiver.

        Returns:
            What the control message says of the payload, and the frames that must follow that message.

        Raises:
            OSError: There is no room for the payload.
        """

    @abstractmethod
    def get(self, ref: PayloadRef, frames: list[memoryview]) -> list[memoryview]:
        """The payload's buffers. They stay valid as long as somebody holds a view of them."""

    @abstractmethod
    def discard(self, ref: PayloadRef) -> None:
        """Releases a payload that nobody will read."""
