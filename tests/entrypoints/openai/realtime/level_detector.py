# SPDX-License-Identifier: Apache-2.0
"""A turn detector without a model: sound is speech, and digital silence ends it at once."""

from concurrent.futures import Executor
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.realtime.turn_detection import Turn


class LevelDetector:
    """In place of a `TurnDetector`. Each piece of 100 ms is speech or silence."""

    num_kept_ms = 0

    def __init__(self, settings: dict[str, Any], sample_rate: int, start_ms: int, threads: Executor) -> None:
        self._step, self._at_ms, self._is_speech = sample_rate // 10, start_ms, False

    async def feed(self, samples: np.ndarray) -> list[Turn]:
        turns = []
        for start in range(0, len(samples), self._step):
            is_speech = bool(samples[start : start + self._step].any())
            if is_speech != self._is_speech:
                turns.append(Turn("started" if is_speech else "stopped", self._at_ms))
            self._is_speech = is_speech
            self._at_ms += 100
        return turns


class PausingDetector(LevelDetector):
    """A pause is 100 ms of silence; 300 ms end a turn."""

    _silence_ms: int | None = None

    async def feed(self, samples: np.ndarray) -> list[Turn]:
        turns = []
        for start in range(0, len(samples), self._step):
            piece, self._at_ms = samples[start : start + self._step], self._at_ms + 100
            if piece.any():
                if self._silence_ms != 0:
                    turns.append(Turn("started" if self._silence_ms is None else "resumed", self._at_ms - 100))
                self._silence_ms = 0
            elif self._silence_ms is not None:
                self._silence_ms += 100
                turns += [Turn("paused", self._at_ms)] if self._silence_ms == 100 else []
                if self._silence_ms == 300:
                    turns.append(Turn("stopped", self._at_ms))
                    self._silence_ms = None
        return turns
