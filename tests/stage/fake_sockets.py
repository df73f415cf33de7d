# SPDX-License-Identifier: Apache-2.0
"""ZMQ sockets without a network: what is sent to an address is kept there."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import zmq

Received = tuple[Any, list[memoryview]]


class FakeContext:
    """Has the interface of `zmq.Context`. Messages stay at their address until they are read."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[bytes]] = defaultdict(deque)

    def socket(self, kind: int) -> "FakeSocket":
        return FakeSocket(self)

    def read(self, address: str, recv: Callable[[Any], Received | None]) -> list[Received]:
        """All messages that were sent to an address, as `recv_at_stage` or `recv_at_orchestrator` decodes them."""
        socket = FakeSocket(self)
        socket.connect(address)
        received = []
        while (item := recv(socket)) is not None:
            received.append(item)
        return received


class FakeSocket:
    def __init__(self, context: FakeContext) -> None:
        self._context = context
        self._address = ""

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN if self._context.sent[self._address] else 0

    def connect(self, address: str) -> None:
        self._address = address

    def close(self, linger: int) -> None:
        self._address = ""

    def send(self, data: bytes) -> None:
        assert self._address, "not connected"
        self._context.sent[self._address].append(data)

    def recv(self, flags: int) -> bytes:
        return self._context.sent[self._address].popleft()
