# SPDX-License-Identifier: Apache-2.0
"""What a server holds of finished requests."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request

from tests.entrypoints.openai.small_apps import ask, make_app
from vllm_omni.entrypoints.openai import memory


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
    monkeypatch.setattr(memory, "COLLECT_AFTER_BYTES", 100)
    app = make_cyclic_app(in_memory)
    counts = [
        ask(app, "POST", "/v1/cycle", content=b'"%026d"' % 0, headers={"content-type": content_type}).json()
        for _ in range(12)
    ]
    assert counts == [1, 2, 3, 4] * 3, "28 bytes each, and a run of the collector for each 100"


def test_small_requests_do_not_run_the_collector(in_memory: weakref.WeakSet[Cycle]) -> None:
    app = make_cyclic_app(in_memory)
    for count in range(1, 50):
        assert ask(app, "POST", "/v1/cycle", json={}).json() == count
