# SPDX-License-Identifier: Apache-2.0
"""Answers that are begun when a user pauses, in case the turn has ended; their number, and what became of them.

A speculative answer is an ordinary response, whose turn is not in the conversation and whose events wait. It is
promoted if a response to the turn would read exactly the same; else it is dropped, and the client never knew of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.realtime.chat_stream import end
from vllm_omni.entrypoints.openai.realtime.config import Values
from vllm_omni.entrypoints.openai.realtime.conversation import Item, Message, Sound, to_messages
from vllm_omni.entrypoints.openai.realtime.response import Response
from vllm_omni.metrics.stats import SpeculationCounts


class Speculations:
    """The speculative answers of all sessions of one server. For its event loop.

    Attributes:
        counts: Of all that ever ran; read by any thread.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: How many may run at once."""
        self._limit = limit
        self._running: set[Response] = set()
        self.counts = SpeculationCounts()

    @property
    def has_room(self) -> bool:
        """Whether one more may run."""
        return len(self._running) < self._limit

    def start(self, response: Response) -> asyncio.Task[None]:
        """Runs a speculative response."""
        self._running.add(response)
        self.counts.started += 1
        task = response.start()
        task.add_done_callback(lambda _: self._end(response))
        return task

    def promote(self, response: Response) -> None:
        """Has the client get it."""
        self._running.remove(response)
        self.counts.promoted += 1
        response.promote()

    def _end(self, response: Response) -> None:
        if response in self._running:
            self._running.remove(response)
            self.counts.wasted_tokens += response.num_written


@dataclass(frozen=True, eq=False)
class _Answer:
    """A speculative answer, and what it reads: `turn` after `items`, which were `messages` then."""

    turn: Item
    response: Response
    task: asyncio.Task[None]
    settings: Values
    items: Sequence[Item]
    messages: Sequence[Message]

    def reads(self, settings: Values, items: Sequence[Item]) -> bool:
        """Whether a response with this configuration that reads these items would be the same.

        Not if an ASR stage has written a text among them since.
        """
        *before, turn = items or (None,)
        return (
            turn is self.turn
            and len(before) == len(self.items)
            and all(item is other for item, other in zip(before, self.items, strict=True))
            and settings == self.settings
            and to_messages(settings["instructions"], self.items) == self.messages
        )


class Speculation:
    """The speculative answers of one session, of which one at most is not dropped."""

    def __init__(self, speculations: Speculations) -> None:
        self._speculations = speculations
        self._answer: _Answer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def has_room(self) -> bool:
        """See `Speculations`."""
        return self._speculations.has_room

    def start(self, turn: Item, response: Response, settings: Values, items: Sequence[Item]) -> asyncio.Task[None]:
        """Runs the answer to a turn that has paused; the one before was dropped.

        Args:
            turn: It is not in the conversation.
            response: A speculative one.
            settings: Its configuration.
            items: What it reads before the turn.
        """
        task = self._speculations.start(response)
        messages = to_messages(settings["instructions"], items)
        self._answer = _Answer(turn, response, task, settings, list(items), messages)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def turn_of(self, sound: Sound, item_id: str, asr_settings: dict[str, Any]) -> Item | None:
        """The turn that an answer was begun to, if this is it: it has the same sound before its last pause.

        Args:
            sound, item_id, asr_settings: Of the turn, which has ended.
        """
        if (answer := self._answer) is None:
            return None
        turn, heard = answer.turn, answer.turn.sounds[0].samples
        is_same = (
            (item_id, asr_settings) == (turn.id, turn.asr_settings)
            and sound.num_spoken == len(heard)
            and np.array_equal(sound.spoken, heard)
        )
        return turn if is_same else None

    def promote(self, settings: Values, items: Sequence[Item]) -> tuple[Response, asyncio.Task[None]] | None:
        """The running response that is what one with this configuration would be that reads these items; the client
        gets it from now on. None: there is none."""
        answer = self._answer
        if answer is None or not answer.response.can_be_promoted or not answer.reads(settings, items):
            return None
        self._answer = None
        self._speculations.promote(answer.response)
        return answer.response, answer.task

    def drop(self) -> None:
        """Aborts the answer, if there is one."""
        if self._answer is not None:
            self._answer.task.cancel()
            self._answer = None

    async def close(self) -> None:
        """Aborts all, and waits for their ends."""
        self._answer = None
        await asyncio.gather(*map(end, self._tasks))
