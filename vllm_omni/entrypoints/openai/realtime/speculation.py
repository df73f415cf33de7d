# SPDX-License-Identifier: Apache-2.0
"""Answers that are begun when a user pauses, in case the turn has ended; their number, and what became of them.

A speculative answer is an ordinary response, whose turn is not in the conversation and whose events wait. It is
promoted if a response to the turn would read exactly the same; else it is dropped, and the client never knew of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.realtime.audio import Sound
from vllm_omni.entrypoints.openai.realtime.config import Values
from vllm_omni.entrypoints.openai.realtime.conversation import Item
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
        self._running: dict[Response, asyncio.Task[None]] = {}
        self.counts = SpeculationCounts()

    @property
    def has_room(self) -> bool:
        """Whether one more may run."""
        return len(self._running) < self._limit

    def start(self, response: Response) -> None:
        """Runs a speculative response."""
        task = self._running[response] = response.start()
        self.counts.started += 1
        task.add_done_callback(lambda _: self._end(response))

    def promote(self, response: Response) -> asyncio.Task[None]:
        """Has the client get it."""
        self.counts.promoted += 1
        response.promote()
        return self._running.pop(response)

    def drop(self, response: Response) -> None:
        """Aborts it, if it runs."""
        if response in self._running:
            self._running[response].cancel()

    def _end(self, response: Response) -> None:
        if self._running.pop(response, None) is not None:
            self.counts.wasted_tokens += response.num_written


class Speculation:
    """The speculative answer of one session, the last that was begun and not dropped."""

    def __init__(self, speculations: Speculations) -> None:
        self._speculations = speculations
        self._response: Response | None = None

    @property
    def has_room(self) -> bool:
        """See `Speculations`."""
        return self._speculations.has_room

    def start(self, response: Response) -> None:
        """Runs the answer to a turn that has paused, and is not in the conversation; the one before was dropped."""
        self._speculations.start(response)
        self._response = response

    def turn_of(self, sound: Sound, item_id: str, asr_settings: dict[str, Any]) -> Item | None:
        """The turn that an answer was begun to, if this is it: it has the same sound before its last pause.

        Args:
            sound, item_id, asr_settings: Of the turn, which has ended.
        """
        if self._response is None:
            return None
        turn = self._response.turn
        heard = turn.sounds[0].samples
        is_same = (
            (item_id, asr_settings) == (turn.id, turn.asr_settings)
            and sound.num_spoken == len(heard)
            and np.array_equal(sound.spoken, heard)
        )
        return turn if is_same else None

    def promote(self, settings: Values, items: Sequence[Item]) -> tuple[Response, asyncio.Task[None]] | None:
        """The running response that is what one with this configuration would be that reads these items; the client
        gets it from now on. None: there is none."""
        response = self._response
        if response is None or not response.matches(settings, items):
            return None
        self._response = None
        return response, self._speculations.promote(response)

    def drop(self) -> None:
        """Aborts the answer, if there is one."""
        if self._response is not None:
            self._speculations.drop(self._response)
            self._response = None
