# SPDX-License-Identifier: Apache-2.0
"""Events on their way from the orchestrator's thread to the readers on an event loop.

Imports neither torch nor vLLM, as `AsyncOmniLLM`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.events import OmniEvent


class EventQueue:
    """The events of one request that its reader has not taken. Belongs to the event loop.

    A reader that is slower than the model gets several segments of its text as one: what it does for each is done once.
    """

    def __init__(self) -> None:
        self._events: deque[OmniEvent | BaseException] = deque()
        self._has_events = asyncio.Event()
        self._num_taken = 0

    def put(self, event: OmniEvent | BaseException) -> None:
        """`event`: `get` raises an exception."""
        last = self._events[-1] if self._events else None
        if last is not None and not isinstance(last, BaseException) and not isinstance(event, BaseException):
            merged = last.merge(event)
            if merged is not None:
                self._events[-1] = merged
                return
        self._events.append(event)
        self._has_events.set()

    async def get(self) -> OmniEvent:
        while not self._events:
            self._has_events.clear()
            await self._has_events.wait()
        event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        event.sequence = self._num_taken  # The reader counts what it gets.
        self._num_taken += 1
        return event


class EventDelivery:
    """Puts events into queues of a loop, from any thread; wakes the loop once for all that it has not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[EventQueue, OmniEvent]] = deque()
        self._is_woken = False  # The loop will read `_events` anyway.

    def put(self, queue: EventQueue, event: OmniEvent) -> None:
        """
        Raises:
            RuntimeError: The loop is closed.
        """
        self._events.append((queue, event))
        if not self._is_woken:
            self._is_woken = True  # Before the loop is woken, which may deliver at once.
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._is_woken = False
                raise

    def _deliver(self) -> None:
        self._is_woken = False  # Before the events are taken: later ones wake the loop again.
        while self._events:
            queue, event = self._events.popleft()
            queue.put(event)
