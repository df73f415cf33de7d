# SPDX-License-Identifier: Apache-2.0
"""The two programs of `scale_out.py` that measure hops between hosts.

    python benchmarks/remote_hop.py echo '{"peer": "10.77.0.2:7000", ...}'         on the second host: answers messages
    python benchmarks/remote_hop.py measure '{"peers": ["10.77.0.2:7000", ...]}'   on the first: prints seconds

Their options are the arguments of `echo` and `measure`.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
from runtime import write_chain

from vllm_omni import AsyncOmniLLM, CompletedEvent, ErrorEvent
from vllm_omni.distributed.curve import Authenticator, CurveKeys
from vllm_omni.inputs import OmniPrompt

MESSAGE = b"x" * 128
LARGE = 64 << 20


class Ends:
    """A PUSH and a PULL socket, as between stages on two hosts."""

    def __init__(self, keys: CurveKeys | None) -> None:
        self.context = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.authenticator = None
        if keys is not None:
            self.authenticator = Authenticator(self.context, keys)
            keys.secure_server(self.pull)
            keys.secure_client(self.push)

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=1000)


def echo(peer: str, keys: CurveKeys | None) -> None:
    """Answers each message; an empty one ends it."""
    ends = Ends(keys)
    ends.pull.bind(f"tcp://{peer}")
    ends.push.connect(f"tcp://{ends.pull.recv().decode()}")
    while message := ends.pull.recv(copy=False):
        if not len(message):
            break
        ends.push.send(MESSAGE)
    ends.close()


class Echo:
    """The other end of `echo`."""

    def __init__(self, host: str, peer: str, keys: CurveKeys | None) -> None:
        self._ends = Ends(keys)
        port = self._ends.pull.bind_to_random_port(f"tcp://{host}")
        self._ends.push.connect(f"tcp://{peer}")
        self._ends.push.send(f"{host}:{port}".encode())

    def time_of(self, message: bytes) -> float:
        """Seconds until a message has been answered with a small one."""
        started = time.monotonic()
        self._ends.push.send(message, copy=False)
        self._ends.pull.recv()
        return time.monotonic() - started

    def close(self) -> None:
        self._ends.push.send(b"")
        self._ends.close()


async def hop(llm: AsyncOmniLLM, num_bytes: int, is_unread: bool = False) -> float:
    """Seconds, as the last stage measured them."""
    prompt: OmniPrompt = {"prompt": "", "additional_information": {"num_bytes": num_bytes, "is_unread": is_unread}}
    async for event in llm.generate(prompt):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, CompletedEvent):
            return float(event.outputs[0].outputs[0].text)
    raise AssertionError("a request ends with an event")


async def in_turns(llm: AsyncOmniLLM, echo: Echo, message: bytes, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of round trips and of hops, each from rest; the first round warms up."""
    seconds: dict[str, list[float]] = {"zmq": [], "hop": []}
    num_bytes = len(message) if len(message) == LARGE else 0
    for number in range(1 + rounds):
        for _ in range(count):
            values = {"zmq": echo.time_of(message), "hop": await hop(llm, num_bytes)}
            for name, value in values.items():
                seconds[name] += [value] if number else []
    return seconds


async def small_hops_beside_large_ones(llm: AsyncOmniLLM, count: int) -> list[float]:
    """Of requests that follow each other, while two large payloads are always on their way."""

    async def keep_busy() -> None:
        while True:
            await hop(llm, LARGE, is_unread=True)  # Small ones would wait for the stage while it reads.

    busy = [asyncio.create_task(keep_busy()) for _ in range(2)]
    await hop(llm, LARGE, is_unread=True)
    seconds = [await hop(llm, 0) for _ in range(count)]
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    return seconds


async def measure(
    host: str, peers: Sequence[str], encrypt: str, rounds: int, count: int, keys: CurveKeys
) -> dict[str, list[float]]:
    """`peers`: where `echo` runs, for small messages and for large ones."""
    runtime = {"distributed_backend": "ray", "encrypt": encrypt}
    places = [{"resources": {name: 0.1}} for name in ("h1", "h2")]
    small, large = Echo(host, peers[0], keys), Echo(host, peers[1], keys if encrypt == "all" else None)
    with (
        tempfile.TemporaryDirectory() as name,
        AsyncOmniLLM("", str(write_chain(Path(name), ["send", "receive"], places, **runtime))) as llm,
    ):
        seconds = await in_turns(llm, small, MESSAGE, rounds, count)
        of_large = await in_turns(llm, large, bytes(LARGE), rounds, max(2, count // 50))
        seconds |= {f"{name}_64mb": values for name, values in of_large.items()}
        seconds["hop_beside_64mb"] = await small_hops_beside_large_ones(llm, count)
    small.close()
    large.close()
    return seconds


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    options["keys"] = options["keys"] and msgspec.convert(options["keys"], CurveKeys)
    if sys.argv[1] == "echo":
        echo(**options)
    else:
        print("\n" + json.dumps(asyncio.run(measure(**options))))
