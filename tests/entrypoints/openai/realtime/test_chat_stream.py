# SPDX-License-Identifier: Apache-2.0
"""What the tasks of sessions do when they are cancelled."""

import asyncio

import pytest

from vllm_omni.entrypoints.openai.realtime.chat_stream import end


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
