# SPDX-License-Identifier: Apache-2.0
"""Callers who leave while their picture is being painted: how much is still painted for them?

The stage counts the batches that it computes. How many of them a picture begins with, and how many a denoising step
takes, is found by asking for pictures of different lengths first.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from painters import Order, make_prompts

from vllm_omni import AsyncOmniLLM, ErrorEvent, ImageProgressEvent

SHORT, LONG = 2, 6


@dataclass(frozen=True)
class Walkout:
    """One caller who left.

    Attributes:
        seen: Denoising steps that the caller had seen.
        steps_after: Steps that were begun or completed besides those.
        free_s: Seconds from there to the end of a picture of one step, beyond what that takes by itself.
    """

    seen: int
    steps_after: float
    free_s: float


class Gallery:
    """A pipeline with its statistics switched on, and nobody else in it."""

    def __init__(self, llm: AsyncOmniLLM, order: Order) -> None:
        self._llm = llm
        self._order = order
        self._prompt = make_prompts(1)[0]

    def walk_out(self, times: int, seed: int) -> list[Walkout]:
        """So many callers, one after the other, each of whom leaves at a random step."""
        return asyncio.run(self._walk_out(times, random.Random(seed)))

    async def _walk_out(self, times: int, rng: random.Random) -> list[Walkout]:
        await self._batches_of(SHORT)  # warms up
        short, long = await self._batches_of(SHORT), await self._batches_of(LONG)
        per_step = (long - short) / (LONG - SHORT)
        before_steps = short - SHORT * per_step
        next_batches = await self._batches_of(1)
        next_seconds = min([await self._seconds_of(1) for _ in range(5)])
        walkouts = []
        for _ in range(times):
            last = rng.randrange(self._order.num_inference_steps - 2)
            before = self._num_batches()
            await self._leave_at(last)
            free_s = await self._seconds_of(1) - next_seconds
            batches = self._num_batches() - before - next_batches - before_steps
            walkouts.append(Walkout(last + 1, batches / per_step - (last + 1), free_s))
        return walkouts

    async def _leave_at(self, last: int) -> None:
        """Asks for a picture, and leaves when it hears of that step, counted from 0."""
        events = self._llm.generate(self._prompt, [self._params(self._order.num_inference_steps)])
        async for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent) and event.step >= last:
                break
        await events.aclose()  # type: ignore[attr-defined]

    async def _batches_of(self, steps: int) -> int:
        before = self._num_batches()
        await self._seconds_of(steps)
        return self._num_batches() - before

    async def _seconds_of(self, steps: int) -> float:
        started = time.perf_counter()
        async for event in self._llm.generate(self._prompt, [self._params(steps)], stream=False):
            if isinstance(event, ErrorEvent):
                raise event.error
        return time.perf_counter() - started

    def _params(self, steps: int) -> dict[str, Any]:
        """Latents: what comes after the steps is not counted here."""
        return self._order.params(num_inference_steps=steps, output_format="latent")

    def _num_batches(self) -> int:
        return self._llm.stats()[0].num_steps
