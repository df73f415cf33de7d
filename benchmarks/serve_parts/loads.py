# SPDX-License-Identifier: Apache-2.0
"""When requests are sent, and what each of them saw. Knows nothing of HTTP and pipelines: a caller does the asking.

Only the standard library and numpy are imported, so that the process that asks over HTTP is small.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Load:
    """Requests, and when they are sent. Either `concurrency` callers send one each, and the next one when that is done
    (closed loop), or one is sent whenever it is due, at random times of a mean `rate` (open loop).

    Attributes:
        endpoint: A key of `asks.ENDPOINTS`.
        count: Requests; the questions are used in turn.
        concurrency: Callers; 0 in an open loop.
        rate: Requests in a second; 0 in a closed loop.
        seed: Of the times between requests.
        keeps_speech: Answers have all samples.
    """

    endpoint: str
    count: int
    concurrency: int = 0
    rate: float = 0.0
    seed: int = 0
    keeps_speech: bool = False

    @property
    def name(self) -> str:
        return f"c{self.concurrency}" if self.concurrency else f"{self.rate:.3g}/s"

    def due(self) -> list[float]:
        """Seconds after the start at which the requests of an open loop are sent: a Poisson process."""
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, self.count)
        return np.cumsum(gaps).tolist()


@dataclass
class Answer:
    """What came of one request. Times are seconds since it was sent, or was due.

    Attributes:
        question: Which one it was.
        first_text, first_audio: The first piece was there; 0 where none came.
        completed: The end.
        text: What was written.
        num_samples: Of speech.
        speech: The samples, 16 bits each, where they are kept.
        error: What went wrong; empty if nothing did.
    """

    question: int
    first_text: float = 0.0
    first_audio: float = 0.0
    completed: float = 0.0
    text: str = ""
    num_samples: int = 0
    speech: bytes = b""
    error: str = ""

    def hear(self, speech: bytes, keep: bool) -> None:
        self.num_samples = len(speech) // 2
        self.speech = speech if keep else b""

    def difference(self, other: "Answer") -> float:
        """The largest between two samples of both, in steps of 16 bits; infinite where they say something else."""
        if (self.text, self.num_samples) != (other.text, other.num_samples):
            return math.inf
        ours, theirs = (np.frombuffer(answer.speech, "<i2").astype(int) for answer in (self, other))
        return float(np.abs(ours - theirs).max(initial=0))


@dataclass
class Session:
    """All answers of one load.

    Attributes:
        seconds: From the first request to the end of the last.
        cpu_seconds: That the process which talks to the pipeline (the server, or the program) has used meanwhile,
            without the stages' processes.
    """

    seconds: float
    answers: list[Answer] = field(default_factory=list)
    cpu_seconds: float = 0.0


async def drive(load: Load, call: Callable[[int], Awaitable[Any]]) -> tuple[float, list[Any]]:
    """Sends the requests of a load; `call` is given their numbers.

    Returns:
        Seconds that it took, and what `call` gave, in the order of the numbers.
    """
    started = time.monotonic()
    results = await (_closed(load, call) if load.concurrency else _open(load, call))
    return time.monotonic() - started, results


async def _closed(load: Load, call: Callable[[int], Awaitable[Any]]) -> list[Any]:
    numbers = iter(range(load.count))
    results: dict[int, Any] = {}

    async def caller() -> None:
        for number in numbers:
            results[number] = await call(number)

    await asyncio.gather(*(caller() for _ in range(load.concurrency)))
    return [results[number] for number in range(load.count)]


async def _open(load: Load, call: Callable[[int], Awaitable[Any]]) -> list[Any]:
    started = time.monotonic()

    async def later(number: int, due: float) -> Any:
        await asyncio.sleep(max(0.0, started + due - time.monotonic()))
        return await call(number)

    return await asyncio.gather(*(later(number, due) for number, due in enumerate(load.due())))


def percentiles(values: Sequence[float]) -> list[float]:
    """p50, p95 and p99."""
    return [float(value) for value in np.percentile(values, [50, 95, 99])] if values else [0.0] * 3
