# SPDX-License-Identifier: Apache-2.0
"""Many concurrent requests, of which some are aborted at random moments, leave nothing behind."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.entrypoints.fake_pipelines import wait_until_free
from vllm_omni import AsyncOmniLLM
from vllm_omni.events import CompletedEvent
from vllm_omni.testing.media import make_prompt

GROUP = "llm"
NUM_REQUESTS, CONCURRENCY, NUM_ABORTED = 120, 16, 40
PARAMS = [{"max_tokens": 4}, {"max_tokens": 8, "detokenize": False}, None]


@pytest.mark.slow
def test_a_storm_of_aborts_leaves_nothing(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    llm, rng = talking_async_llm, random.Random(1)
    prompts = [make_prompt(tiny_qwen3_omni_moe, "text", seed) for seed in range(8)]
    aborted = set(rng.sample(range(NUM_REQUESTS), NUM_ABORTED))
    numbers, ends = iter(range(NUM_REQUESTS)), Counter[str]()

    async def complete(number: int) -> None:
        events = [event async for event in llm.generate(prompts[number % len(prompts)], PARAMS)]
        assert isinstance(events[-1], CompletedEvent), events[-1]

    async def client() -> None:
        for number in numbers:
            task = asyncio.create_task(complete(number))
            done, _ = await asyncio.wait([task], timeout=rng.uniform(0, 0.5) if number in aborted else None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=not done)
            ends["completed" if done else "aborted"] += 1

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))

    asyncio.run(run())
    assert ends.total() == NUM_REQUESTS and ends["aborted"] > 0
    wait_until_free(llm)
