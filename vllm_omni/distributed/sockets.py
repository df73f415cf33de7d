# SPDX-License-Identifier: Apache-2.0
"""Receiving from a ZMQ socket without waiting; what is received there from others than the pipeline's processes."""

from collections.abc import Iterator
from typing import Any, cast

import zmq

from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)


def arrived(socket: zmq.Socket, copy: bool = True) -> Iterator[list[Any]]:
    """The messages that have arrived, each as a list of its frames."""
    while cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # Cheaper to ask than to catch `zmq.Again`.
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        except zmq.Again:  # The sender has died, and its message is gone.
            return


class Dropped:
    """The packets that a socket has dropped, because no process of the pipeline sends such.

    Any other process that reaches the port may have sent them, as often as it likes: only the first is logged.

    Attributes:
        count: Their number.
    """

    def __init__(self, expected: str) -> None:
        """`expected`: what the socket receives, for the log."""
        self.count = 0
        self._expected = expected

    def add(self, frames: list[Any]) -> None:
        if not self.count:
            size = sum(len(frame) for frame in frames)
            logger.warning(
                "a packet of %d bytes in %d frames is no %s; it is dropped, and so are others, without a log line. "
                "Another program can reach a port of the pipeline (runtime.network_interface)",
                size,
                len(frames),
                self._expected,
            )
        self.count += 1
