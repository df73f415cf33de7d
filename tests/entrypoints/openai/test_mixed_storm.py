# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests of all kinds, half of them cut off, leave neither files, nor threads, nor memory."""

import asyncio
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.entrypoints.fake_pipelines import is_idle, running
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer
from tests.fuzz.campaign import num_files
from tests.orchestrator.test_failure import wait_until
from vllm_omni import AsyncOmniLLM

CONCURRENCY = 48
COUNTS = (500, 1500, 3000)
"""Of requests, after which what is held is measured."""
PATIENCE_S = 120
"""Many times as long as so many requests take."""
MAX_GROWTH = 16 << 20
"""Bytes of a process between the last two of them: 11 kB for each of 1,500 requests."""
TOKENS = {"fake_tokens": 10, "fake_seconds": 0.002, "fake_only": "writer"}
BODIES: tuple[tuple[str, dict[str, Any] | None, int], ...] = (
    ("/v1/generate", {"stream": True, "options": TOKENS}, 200),
    ("/v1/generate", {"stream": False, "options": TOKENS}, 200),
    ("/v1/generate", {"stream": False, "options": {"text": "x" * 10_000, "fake_bytes": 200_000}}, 200),
    ("/v1/generate", {"stream": True, "options": TOKENS | {"fake_images": 2}}, 200),
    ("/v1/generate", {"stream": False, "options": TOKENS | {"fake_steps": 2}}, 200),
    ("/v1/generate", {"stream": False, "options": {"fake_fail": "speaker"}}, 500),
    ("/v1/generate", {"stream": "perhaps"}, 400),
    ("/v1/nothing", {}, 404),
    ("/health", None, 200),
)
"""Paths, bodies and the status of the answer."""


def held(llm: AsyncOmniLLM) -> list[tuple[int, int, int]]:
    """Open files, threads and bytes of this process and of those of the stages."""
    assert is_idle(llm)
    gc.collect()
    stages = [stage.process.pid for stage in llm._pipeline.orchestrator._supervisor.stages if stage.process is not None]
    processes = map(psutil.Process, (os.getpid(), *stages))
    return [(num_files(process), process.num_threads(), process.memory_info().rss) for process in processes]


@pytest.mark.slow
def test_thousands_of_mixed_requests_half_of_them_cut_off(tmp_path: Path) -> None:
    rng = random.Random(3)
    ends, cut_off = Counter[int](), 0
    measured: list[list[tuple[int, int, int]]] = []

    async def client(server: FakeServer, numbers: Iterator[int]) -> None:
        nonlocal cut_off
        for number in numbers:
            path, body, status = BODIES[number % len(BODIES)]
            request = AppRequest(server.app, path, body)
            if status in (200, 500) and rng.random() < 0.75:
                await asyncio.wait([request._task], timeout=rng.uniform(0.0, 0.04))
                cut_off += not request._task.done()
                await request.disconnect()
            else:
                await asyncio.wait([request._task])
                ends[request.status] += 1
                assert request.status == status, (path, body, request.chunks)

    async def send(server: FakeServer, first: int, last: int) -> None:
        numbers = iter(range(first, last))
        clients = [asyncio.create_task(client(server, numbers)) for _ in range(CONCURRENCY)]
        done, waiting = await asyncio.wait(clients, timeout=PATIENCE_S)
        for task in asyncio.all_tasks() if waiting else ():
            task.print_stack(file=sys.stdout)
        assert not waiting, llm.stats_table()
        for task in done:
            task.result()

    with running(AsyncOmniLLM, tmp_path, max_inflight=32, max_queued=CONCURRENCY) as llm:
        server = FakeServer(llm)
        for first, last in zip((0, *COUNTS), COUNTS, strict=False):
            asyncio.run(send(server, first, last))
            measured.append(held(llm))
        print(f"{cut_off} cut off; {dict(ends)}; files, threads, bytes: {measured}")
        assert ends.keys() == {200, 400, 404, 500} and cut_off > COUNTS[-1] / 3
        for before, after in zip(*measured[-2:], strict=True):
            assert after[2] - before[2] < MAX_GROWTH, measured

        def has_no_more() -> bool:
            """Files and threads than after fewer requests: what is only being closed or replaced is so soon."""
            processes = zip(*measured[:-1], held(llm), strict=True)
            return all(now[i] <= max(each[i] for each in before) for *before, now in processes for i in range(2))

        wait_until(has_no_more, lambda: f"{measured}, now {held(llm)}")
        assert {stage.state for stage in llm.health()} == {"ready"}
