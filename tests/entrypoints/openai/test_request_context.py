# SPDX-License-Identifier: Apache-2.0
"""The context of an HTTP request: one for each, reached from all of its tasks."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.entrypoints.openai.small_apps import make_app, send
from vllm_omni.entrypoints.openai.request_context import Peekable, RequestContext, started


async def numbers(closed: list[str], *, fail: bool = False) -> AsyncGenerator[int, None]:
    try:
        if fail:
            raise ValueError("no first number")
        for number in range(3):
            yield number
    finally:
        closed.append("failed" if fail else "closed")


def test_every_request_has_its_own_context_in_all_of_its_tasks() -> None:
    contexts = []
    app = make_app()

    @app.get("/v1/context")
    async def endpoint() -> bool:
        contexts.append(RequestContext.current())
        in_task = await asyncio.create_task(asyncio.to_thread(RequestContext.current))
        return in_task is contexts[-1]

    assert [send(app, "GET", "/v1/context").json() for _ in range(2)] == [True, True]
    assert contexts[0] is not contexts[1]
    assert RequestContext.current() is not RequestContext.current(), "outside of a request nothing is shared"


def test_an_item_that_was_awaited_is_not_lost() -> None:
    async def main() -> list[int]:
        return [number async for number in await started(numbers([]))]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_request_that_fails_at_its_start_aborts_the_others() -> None:
    async def main() -> list[str]:
        closed: list[str] = []
        context = RequestContext(outputs=[Peekable(numbers(closed)), Peekable(numbers(closed, fail=True))])
        with pytest.raises(ValueError, match="no first number"):
            await context.started()
        return closed

    assert asyncio.run(main()) == ["failed", "closed"]
