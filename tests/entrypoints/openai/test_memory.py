# SPDX-License-Identifier: Apache-2.0
"""The memory of finished requests."""

import gc
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request

from tests.entrypoints.openai.small_apps import make_app, send
from vllm_omni.entrypoints.openai import middleware
from vllm_omni.metrics import memory

pytestmark = pytest.mark.slow


class Cycle:
    """Refers to itself, and to the body of a request."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.itself = self


@pytest.fixture
def in_memory() -> Iterator[weakref.WeakSet[Cycle]]:
    """The cycles in memory. Python runs its collector after far more requests than a test sends."""
    gc.disable()
    yield weakref.WeakSet()
    gc.enable()


def make_cyclic_app(in_memory: weakref.WeakSet[Cycle]) -> FastAPI:
    app = make_app()

    @app.post("/v1/cycle")
    async def cycle(request: Request) -> int:
        in_memory.add(Cycle(await request.body()))
        return len(in_memory)

    return app


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
def test_cycles_are_freed_by_the_bytes_of_the_bodies(
    content_type: str, in_memory: weakref.WeakSet[Cycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "COLLECT_AFTER_BYTES", 100)
    app = make_cyclic_app(in_memory)
    counts = [
        send(app, "POST", "/v1/cycle", content=b'"%026d"' % 0, headers={"content-type": content_type}).json()
        for _ in range(12)
    ]
    assert counts == [1, 2, 3, 4] * 3, "28 bytes each, and a run of the collector after each 100"


def test_small_requests_do_not_run_the_collector(in_memory: weakref.WeakSet[Cycle]) -> None:
    app = make_cyclic_app(in_memory)
    for count in range(1, 50):
        assert send(app, "POST", "/v1/cycle", json={}).json() == count


# After a block of 30 MiB has been freed, frees blocks of 8 MiB that were allocated before one that is kept.
DECODER = """
import psutil
{before}
block = b"x" * (30 << 20)
del block
blocks = [b"x" * (8 << 20) for _ in range(9)]
held = psutil.Process().memory_info().vms
del blocks[:-1]
print(held - psutil.Process().memory_info().vms)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_blocks_are_returned_to_the_system() -> None:
    call = "from vllm_omni.metrics.memory import return_large_blocks; return_large_blocks()"
    environment = {name: value for name, value in os.environ.items() if name not in memory._TUNABLES}

    def returned(before: str = "", **variables: str) -> int:
        command = [sys.executable, "-c", DECODER.format(before=before)]
        return int(subprocess.check_output(command, env={**environment, **variables}, text=True).split()[-1])

    assert returned() < 16 << 20, "the C library's default"
    assert returned(call) > 48 << 20
    assert returned(call, MALLOC_MMAP_THRESHOLD_=str(32 << 20)) < 16 << 20, "the environment's setting wins"
