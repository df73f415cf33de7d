# SPDX-License-Identifier: Apache-2.0
"""Receiving from a ZMQ socket without waiting."""

from collections.abc import Iterator
from typing import Any, cast

import zmq


def arrived(socket: zmq.Socket, copy: bool = True) -> Iterator[list[Any]]:
    """The messages that have arrived, each as a list of its frames."""
    while cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # Cheaper to ask than to catch `zmq.Again`.
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        except zmq.Again:  # The sender has died, and its message is gone.
            return
