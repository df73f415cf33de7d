# SPDX-License-Identifier: Apache-2.0
"""What one machine can do without us: a ZMQ round trip between two processes, and a copy of memory.

python bare.py DIRECTORY    is the other end of the round trip
"""

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import torch
import zmq

MESSAGE = b"x" * 128


class RoundTrip:
    """A process that sends back what it receives, over PUSH and PULL sockets on `ipc://`, like those of a stage."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(_address(directory, "back"))
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(_address(directory, "forth"))
        self._echo = subprocess.Popen([sys.executable, __file__, str(directory)])

    def __enter__(self) -> "RoundTrip":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._push.send(b"")
        self._echo.wait()
        self._context.destroy(linger=0)

    def measure(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        started = time.monotonic()
        self._push.send(MESSAGE)
        self._pull.recv()
        return time.monotonic() - started


def echo(directory: Path) -> None:
    """Sends everything back until an empty message comes."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind(_address(directory, "forth"))
        push.connect(_address(directory, "back"))
        while message := pull.recv():
            push.send(message)


def measure_copies(num_bytes: int, count: int) -> list[float]:
    """Seconds of each of `count` copies of a tensor, from and to memory that was in use before."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return [_time_of_copying(source, target) for _ in range(count)]


def _time_of_copying(source: torch.Tensor, target: torch.Tensor) -> float:
    started = time.monotonic()
    target.copy_(source)
    return time.monotonic() - started


def _address(directory: Path, name: str) -> str:
    return f"ipc://{directory}/{name}.sock"


if __name__ == "__main__":
    echo(Path(sys.argv[1]))
