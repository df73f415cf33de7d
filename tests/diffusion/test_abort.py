# SPDX-License-Identifier: Apache-2.0
"""Aborted requests for images: they end at the next step, without an effect on others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.diffusion.watched_engine import NUM_STEPS, SHORT, WatchedEngine, new_request
from tests.entrypoints.fake_pipelines import is_idle, set_deadline
from vllm_omni import AsyncOmniLLM
from vllm_omni.errors import RequestTimeoutError
from vllm_omni.events import CompletedEvent, ErrorEvent, ImageProgressEvent, OmniEvent
from vllm_omni.stage.engines.base import OutboxItem, Stream

ENDLESS = {**SHORT, "num_inference_steps": 100_000}


@pytest.fixture(scope="module")
def watched(tiny_diffusion: Callable[[str], Path]) -> Iterator[WatchedEngine]:
    watched = WatchedEngine(tiny_diffusion("z_image"), max_batch_size=3)
    yield watched
    watched.engine.close()


def test_an_abort_takes_effect_at_the_next_step_and_for_one_request(watched: WatchedEngine) -> None:
    watched.run_to_the_end(new_request("alone", 7))
    alone = watched.tensors("alone")["image"]

    def on_item(item: OutboxItem) -> None:
        if watched.steps("aborted")[-1:] == [(1, 2)]:
            watched.engine.abort("aborted")
        watched.stop_after(1)(item)

    watched.run(new_request("aborted", 1, 2), new_request("stays", 7), on_item=on_item)

    assert watched.steps("aborted") == [(index, step) for step in (0, 1, 2) for index in (0, 1)]
    assert all(isinstance(item, Stream) for item in watched.outbox.items["aborted"]), "an aborted request has no result"
    assert watched.steps("stays") == [(0, step) for step in range(NUM_STEPS)]
    torch.testing.assert_close(watched.tensors("stays")["image"], alone, rtol=0, atol=1e-4)


def test_an_abort_takes_effect_during_any_computation(watched: WatchedEngine) -> None:
    """After each of a request's module calls: of the text encoder, the denoiser, the VAE."""
    num_calls = len(watched.run_to_the_end(new_request("whole", 1)))
    assert num_calls > NUM_STEPS

    for call in range(1, num_calls):

        def on_step(num_steps: int, call: int = call) -> None:
            if num_steps == call:
                watched.engine.abort("aborted")
                watched.engine.stop()

        assert watched.run(new_request("aborted", 1), on_step=on_step) == [1] * call
        assert all(isinstance(item, Stream) for item in watched.outbox.items["aborted"])

    assert watched.run_to_the_end(new_request("whole", 1)) == [1] * num_calls, "nothing is left of the others"


def test_a_request_aborted_while_it_waits_is_not_computed(watched: WatchedEngine) -> None:
    def on_step(num_steps: int) -> None:
        if num_steps == 2:
            watched.engine.abort("waits")

    requests = [new_request("works", 1, 2, 3), new_request("waits", 4), new_request("next", 5)]
    watched.run(*requests, on_step=on_step, on_item=watched.stop_after(2))

    assert watched.outbox.items.keys() == {"works", "next"}
    assert watched.tensors("works")["image"].shape == (3, 32, 32, 3)


def test_an_aborted_request_starts_a_waiting_one(watched: WatchedEngine) -> None:
    """A waiting request begins beside those that are in the middle of theirs."""

    def on_item(item: OutboxItem) -> None:
        if item.request_id == "aborted" and watched.steps("aborted") == [(0, 0)]:
            watched.engine.abort("aborted")
        watched.stop_after(2)(item)

    requests = [new_request("aborted", 1), new_request("works", 2, 3), new_request("waits", 4)]
    watched.run(*requests, on_item=on_item)

    order = watched.outbox.order
    assert order.count("aborted") == 1
    assert order.index("waits") < order.index("works", order.index("waits")), "it begins before the others are done"
    assert len(watched.steps("waits")) == NUM_STEPS and len(watched.steps("works")) == 2 * NUM_STEPS


async def read(events: AsyncIterator[OmniEvent]) -> list[OmniEvent]:
    return [event async for event in events]


async def read_until(step: int, events: AsyncIterator[OmniEvent]) -> None:
    """Leaves when this step is done."""
    async for event in events:
        if isinstance(event, ImageProgressEvent) and event.step == step:
            break
    await events.aclose()  # type: ignore[attr-defined]


def image(events: list[OmniEvent]) -> np.ndarray:
    end = events[-1]
    assert isinstance(end, CompletedEvent), end
    return end.outputs[0].images[0]


def num_computed(llm: AsyncOmniLLM) -> int:
    (stats,) = llm.stats()
    return stats.num_scheduled


def generate(llm: AsyncOmniLLM, seed: int, settings: dict[str, Any] = SHORT) -> AsyncIterator[OmniEvent]:
    return llm.generate(f"image {seed}", {**settings, "seed": seed})


@pytest.fixture(scope="module")
def llm(tiny_diffusion: Callable[[str], Path]) -> Iterator[AsyncOmniLLM]:
    with AsyncOmniLLM(str(tiny_diffusion("z_image")), max_steps=100_000, log_stats=True) as llm:
        yield llm


def test_a_disconnected_client_does_not_affect_others(llm: AsyncOmniLLM) -> None:
    async def main() -> None:
        alone = [image(await read(generate(llm, seed))) for seed in range(3)]
        before = num_computed(llm)
        await read(generate(llm, 0))
        num_calls = num_computed(llm) - before

        leaving = read_until(2, generate(llm, 9, ENDLESS))
        _, *all_events = await asyncio.gather(leaving, *(read(generate(llm, seed)) for seed in range(3)))
        for events, expected in zip(all_events, alone, strict=True):
            steps = [event.step for event in events if isinstance(event, ImageProgressEvent)]
            assert steps == list(range(NUM_STEPS))
            np.testing.assert_allclose(image(events), expected, rtol=0, atol=1e-4)

        assert is_idle(llm)
        await read(generate(llm, 0))  # now the engine has processed the abort
        before = num_computed(llm)
        await read(generate(llm, 0))
        assert num_computed(llm) - before == num_calls, "nothing else is computed"

    asyncio.run(main())


@pytest.mark.slow
def test_a_deadline_ends_one_request(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    set_deadline(llm, monkeypatch, "image 9", 5.0)

    async def main() -> None:
        alone = image(await read(generate(llm, 4)))
        overdue = asyncio.create_task(read(generate(llm, 9, ENDLESS)))
        for _ in range(2):
            np.testing.assert_allclose(image(await read(generate(llm, 4))), alone, rtol=0, atol=1e-4)
        *progress, end = await overdue
        assert isinstance(end, ErrorEvent) and isinstance(end.error, RequestTimeoutError)
        assert len(progress) > NUM_STEPS and all(isinstance(event, ImageProgressEvent) for event in progress)
        assert image(await read(generate(llm, 4))).shape == (32, 32, 3)
        assert is_idle(llm)

    asyncio.run(main())
