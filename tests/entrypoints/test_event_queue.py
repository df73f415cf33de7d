# SPDX-License-Identifier: Apache-2.0
"""Events for readers on an event loop."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from vllm.logprobs import Logprob

from vllm_omni.entrypoints.async_omni_llm import EventDelivery, EventQueue
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent


def segment(sequence: int, **fields: Any) -> ARSegmentEvent:
    defaults = {"stage_id": 0, "final_output_type": "text", "text": f"{sequence} ", "tokens": [sequence]}
    return ARSegmentEvent(request_id="r", sequence=sequence, **{"ts": float(sequence), **defaults, **fields})


def completed(sequence: int) -> CompletedEvent:
    return CompletedEvent(request_id="r", sequence=sequence, ts=0.0, outputs=[])


def read_all(*events: OmniEvent) -> list[OmniEvent]:
    """What a reader gets that comes after all of them."""

    async def main() -> list[OmniEvent]:
        queue = EventQueue()
        for event in events:
            queue.put(event)
        taken = [await queue.get()]
        while not taken[-1].is_terminal:
            taken.append(await queue.get())
        return taken

    return asyncio.run(main())


def test_a_slow_reader_gets_segments_of_one_text_as_one() -> None:
    logprobs = [[{i: Logprob(-float(i))}] for i in (1, 2)]
    end = {"finish_reason": "stop", "stop_reason": 7, "is_last": True}

    text, last = read_all(
        segment(0, logprobs=logprobs[0], num_cached_tokens=32), segment(1, logprobs=logprobs[1], **end), completed(2)
    )

    merged = {
        "text": "0 1 ",
        "tokens": [0, 1],
        "logprobs": [*logprobs[0], *logprobs[1]],
        "num_cached_tokens": 32,
        "ts": 1.0,
    }
    assert text == segment(0, **merged, **end)
    assert last.sequence == 1


@pytest.mark.parametrize(
    "other",
    [{"index": 1}, {"stage_id": 1}, {"multimodal_output": {"audio": torch.zeros(3)}}],
    ids=lambda f: next(iter(f)),
)
def test_other_segments_stay_apart(other: dict[str, Any]) -> None:
    events = [segment(0), segment(1, **other), segment(2), completed(3)]
    assert [event.sequence for event in read_all(*events)] == [0, 1, 2, 3]


def test_a_reader_that_waits_gets_every_event() -> None:
    async def main() -> list[OmniEvent]:
        queue, taken = EventQueue(), []
        for sequence in range(3):
            reader = asyncio.ensure_future(queue.get())
            await asyncio.sleep(0)
            queue.put(segment(sequence))
            taken.append(await reader)
        return taken

    assert asyncio.run(main()) == [segment(sequence) for sequence in range(3)]


def test_an_exception_is_raised_after_the_events_before_it() -> None:
    async def main() -> None:
        queue = EventQueue()
        queue.put(segment(0))
        queue.put(ValueError("no text"))
        assert (await queue.get()).sequence == 0
        with pytest.raises(ValueError, match="no text"):
            await queue.get()

    asyncio.run(main())


def test_what_waits_is_counted_and_refused() -> None:
    """Its memory is free at once, and the reader gets the refusal in place of it."""
    counted, ended = [], []

    def count(num_bytes: int) -> None:
        counted.append(num_bytes)
        if num_bytes > 10_000:
            raise ValueError("too much")

    async def main() -> None:
        queue = EventQueue(count)
        queue.on_refusal = lambda: ended.append(True)
        for _ in range(2):
            queue.put(segment(0))
        assert 0 < counted[0] < counted[1] < 2 * counted[0], "of two segments that were joined"
        await queue.get()
        assert counted[-1] == 0
        queue.put(segment(1, multimodal_output={"audio": torch.zeros(1000)}))
        assert 4000 < counted[-1] < 10_000 and not ended
        queue.put(segment(2, multimodal_output={"audio": torch.zeros(2000)}))
        assert counted[-1] == 0 and ended == [True]
        queue.put(completed(3))
        with pytest.raises(ValueError, match="too much"):
            await queue.get()
        assert counted[-1] == 0 and ended == [True]

    asyncio.run(main())


def test_the_loop_is_woken_once_for_all_events_that_it_has_not_taken() -> None:
    wake_ups = []

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        delivery, queues = EventDelivery(loop), [EventQueue(), EventQueue()]
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (wake_ups.append(args), wake(*args))  # type: ignore[method-assign]

        def deliver() -> None:
            for sequence in range(50):
                for index, queue in enumerate(queues):
                    delivery.put(queue, segment(sequence, index=index))

        thread = threading.Thread(target=deliver)
        thread.start()
        thread.join()  # The loop does not run meanwhile.
        assert len(wake_ups) == 1
        first = [await queue.get() for queue in queues]
        delivery.put(queues[0], segment(50))
        assert len(wake_ups) == 2
        return [len(event.tokens) for event in (*first, await queues[0].get())]

    assert asyncio.run(main()) == [50, 50, 1]


def test_a_loop_that_delivers_at_once_is_woken_again() -> None:
    class QuickLoop(asyncio.SelectorEventLoop):
        """Its own thread is faster than the one that wakes it."""

        def call_soon_threadsafe(self, callback: Any, *args: Any, **kwargs: Any) -> Any:
            callback(*args)

    loop, queue = QuickLoop(), EventQueue()
    delivery = EventDelivery(loop)
    for sequence in range(2):
        delivery.put(queue, segment(sequence, index=sequence))
    assert [loop.run_until_complete(queue.get()).sequence for _ in range(2)] == [0, 1]
    loop.close()


def test_nobody_reads_on_a_closed_loop() -> None:
    loop = asyncio.new_event_loop()
    delivery = EventDelivery(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            delivery.put(EventQueue(), segment(0))


def test_nobody_reads_on_a_loop_that_is_closed_before_it_reads() -> None:
    loop = asyncio.new_event_loop()
    delivery = EventDelivery(loop)
    delivery.put(EventQueue(), segment(0))
    loop.close()
    with pytest.raises(RuntimeError):
        delivery.put(EventQueue(), segment(1))
