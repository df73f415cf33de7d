# SPDX-License-Identifier: Apache-2.0
"""The context of an HTTP request: one for each, reached from all of its tasks."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from fastapi import Request

from tests.entrypoints.openai.small_apps import make_app, send
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext, end, started


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
    async def endpoint(request: Request) -> bool:
        contexts.append(RequestContext.of(request))
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
    async def waiting(closed: list[str]) -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            closed.append("cancelled")

    async def main() -> list[str]:
        closed: list[str] = []
        all_numbers = [numbers(closed), waiting(closed), numbers(closed, fail=True)]
        context = RequestContext(outputs=[PrefetchedStream(each) for each in all_numbers])
        with pytest.raises(ValueError, match="no first number"):
            await context.started()
        return closed

    assert asyncio.run(main()) == ["failed", "cancelled", "closed"]


def test_the_requests_of_one_answer_start_together() -> None:
    async def main() -> list[int]:
        num_started, all_have_started = 0, asyncio.Event()

        async def number(value: int) -> AsyncGenerator[int, None]:
            nonlocal num_started
            num_started += 1
            if num_started == 3:
                all_have_started.set()
            await all_have_started.wait()
            yield value

        context = RequestContext(outputs=[PrefetchedStream(number(value)) for value in range(3)])
        await asyncio.wait_for(context.started(), 10)
        return [value for outputs in context.outputs async for value in outputs]

    assert asyncio.run(main()) == [0, 1, 2]


def test_what_ends_a_task_can_be_cancelled_meanwhile() -> None:
    async def main() -> None:
        may_end = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await may_end.wait()

        inner = asyncio.create_task(work())
        await asyncio.sleep(0)
        outer = asyncio.create_task(end(inner))
        await asyncio.sleep(0)
        outer.cancel()
        await asyncio.sleep(0)
        assert not outer.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert inner.cancelled()

    asyncio.run(asyncio.wait_for(main(), 30))
