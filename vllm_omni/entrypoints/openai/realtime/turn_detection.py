# SPDX-License-Identifier: Apache-2.0
"""Finds when a user speaks, and stays silent: silero-vad over the session's sound. Needs the extra `realtime`.
With `semantic_vad` a turn model, if one is installed, judges at each pause whether the turn has ended.

The package's TorchScript model is run with a state of our own for each session, so that all sessions share its weights.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vllm_omni.entrypoints.openai.audio_formats import SpeechFilter
from vllm_omni.entrypoints.openai.realtime import turn_model
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.extras import install_command

SAMPLE_RATE = 16000
_WINDOW, _CONTEXT = 512, 64
"""Samples that the model reads at a time, and those before them that it reads again."""
_HYSTERESIS = 0.15  # Speech ends below the threshold by this much, as in silero-vad.
_PAUSE_MS = 200
"""Of silence within a turn: it may be the end, and its transcript and answer are begun."""

_DEFAULTS: dict[str, Any] = {"create_response": True, "interrupt_response": True}
_SERVER_VAD: dict[str, Any] = {
    **_DEFAULTS, "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500, "idle_timeout_ms": None,
}  # fmt: skip
_SEMANTIC_VAD: dict[str, Any] = {**_DEFAULTS, "eagerness": "auto"}
_SILENCE_MS = {"low": 1200, "medium": 800, "auto": 800, "high": 400}
"""How long silence lasts at a turn's end, by `eagerness`, where no model judges whether a turn is complete."""
_MAX_SILENCE_MS = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}
"""At the end of a turn that the model takes for incomplete: OpenAI's."""
_NUM_WINDOWS_BEFORE = 16
"""Half a second before the speech of a turn, which the model reads, too."""
_MAX_MS = 10_000
_MIN_IDLE_MS, _MAX_IDLE_MS = 1_000, 60_000


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """A client's `turn_detection`, complete."""
    defaults = _SEMANTIC_VAD if given["type"] == "semantic_vad" else _SERVER_VAD
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def check(settings: dict[str, Any], at: str) -> None:
    """
    Args:
        settings: Complete ones.

    Raises:
        EventError: A value is out of range, or silero-vad is not installed.
    """
    timeout_ms = settings.get("idle_timeout_ms")
    if timeout_ms is not None and not _MIN_IDLE_MS <= timeout_ms <= _MAX_IDLE_MS:
        message = f"idle_timeout_ms must be from {_MIN_IDLE_MS} to {_MAX_IDLE_MS}, or null"
        raise EventError(message, f"{at}.idle_timeout_ms")
    if not 0 <= settings.get("threshold", 0.5) <= 1:
        raise EventError("threshold must be from 0 to 1", f"{at}.threshold")
    for name in ("prefix_padding_ms", "silence_duration_ms"):
        if not 0 <= settings.get(name, 0) <= _MAX_MS:
            raise EventError(f"{name} must be from 0 to {_MAX_MS}", f"{at}.{name}")
    if not is_installed():
        raise EventError(f"turn detection needs silero-vad: {install_command('realtime')}; or set it to null", at)


def is_installed() -> bool:
    """Whether silero-vad is there."""
    return importlib.util.find_spec("silero_vad") is not None


@functools.cache
def _model() -> Any:
    """The network for 16 kHz: `([1, context + window], state [2, 1, 128]) -> ([1, 1], state)`."""
    spec = importlib.util.find_spec("silero_vad")
    assert spec is not None and spec.origin is not None
    return torch.jit.load(str(Path(spec.origin).parent / "data" / "silero_vad.jit"), map_location="cpu")._model


@dataclass(frozen=True)
class Turn:
    """Speech has started, paused, resumed or stopped. It stops after a pause, unless the silence of a turn's end is
    shorter.

    Attributes:
        at_ms: When, in the sound of the session. A start is `prefix_padding_ms` before the speech.
        may_end: Of a pause: whether no model has judged that the turn goes on.
    """

    kind: Literal["started", "paused", "resumed", "stopped"]
    at_ms: int
    may_end: bool = True


class TurnDetector:
    """Reads a session's sound as it arrives. One caller at a time."""

    def __init__(self, settings: dict[str, Any], sample_rate: int, start_ms: int, threads: Executor) -> None:
        """
        Args:
            settings: A `turn_detection` with its defaults.
            sample_rate: Of the sound, in Hz.
            start_ms: Where the sound starts, in that of the session.
            threads: Read it, of all sessions in turn: a second of it takes some milliseconds.
        """
        self._threads, self._step = threads, sample_rate
        self._start_ms = start_ms
        self._prefix_ms = settings.get("prefix_padding_ms", _SERVER_VAD["prefix_padding_ms"])
        self._threshold = settings.get("threshold", _SERVER_VAD["threshold"])
        eagerness = settings.get("eagerness")
        self._has_turn_model = eagerness is not None and turn_model.find() is not None
        silences = _MAX_SILENCE_MS if self._has_turn_model else _SILENCE_MS
        self._silence_ms = settings.get("silence_duration_ms") or silences.get(eagerness or "", 0)
        self._heard: deque[np.ndarray] = deque(maxlen=turn_model.MAX_SECONDS * SAMPLE_RATE // _WINDOW)
        self._filter = SpeechFilter(sample_rate, SAMPLE_RATE, 1.0, 1)
        self._rest = np.zeros(0, np.float32)
        self._context = torch.zeros(1, _CONTEXT)
        self._state = torch.zeros(2, 1, 128)
        self._num_read = 0
        self._speech_end: int | None = None  # The sample after the last speech, of a turn.
        self._is_paused = False

    @property
    def num_kept_ms(self) -> int:
        """How much of the sound without speech can still become part of a turn."""
        return self._prefix_ms + _ms(2 * _WINDOW)

    async def feed(self, samples: np.ndarray) -> list[Turn]:
        """
        Args:
            samples: int16 `[n]`.

        Returns:
            What has happened in them.
        """
        loop = asyncio.get_running_loop()
        turns: list[Turn] = []
        for start in range(0, len(samples), self._step):
            piece = samples[start : start + self._step]
            turns += await loop.run_in_executor(self._threads, list, self._feed(piece))
        return turns

    def _feed(self, samples: np.ndarray) -> Iterator[Turn]:
        resampled = self._filter.run(samples.astype(np.float32)[None] / 32768.0)[0]
        self._rest = np.concatenate([self._rest, resampled])
        while len(self._rest) >= _WINDOW:
            window, self._rest = self._rest[:_WINDOW], self._rest[_WINDOW:]
            self._num_read += _WINDOW
            if self._has_turn_model:
                self._heard.append(window)
            if turn := self._judge(self._probability(window)):
                yield turn

    def _probability(self, window: np.ndarray) -> float:
        """The probability that a window has speech."""
        x = torch.cat([self._context, torch.from_numpy(window.astype(np.float32))[None]], dim=1)
        with torch.inference_mode():
            probability, self._state = _model()(x, self._state)
        self._context = x[:, -_CONTEXT:]
        return float(probability)

    def _judge(self, probability: float) -> Turn | None:
        if self._speech_end is None:
            if probability < self._threshold:
                return None
            self._speech_end = self._num_read
            while len(self._heard) > _NUM_WINDOWS_BEFORE:
                self._heard.popleft()
            speech_ms = self._start_ms + _ms(self._num_read - _WINDOW)
            return Turn("started", max(self._start_ms, speech_ms - self._prefix_ms))
        silence_ms = _ms(self._num_read - self._speech_end)
        if probability >= self._threshold - _HYSTERESIS:
            self._speech_end, was_paused = self._num_read, self._is_paused
            self._is_paused = False
            return Turn("resumed", self._start_ms + _ms(self._num_read - _WINDOW)) if was_paused else None
        at_ms, pauses = self._start_ms + _ms(self._num_read), silence_ms >= _PAUSE_MS and not self._is_paused
        if silence_ms >= self._silence_ms or (pauses and self._is_complete()):
            self._speech_end, self._is_paused = None, False
            return Turn("stopped", at_ms)
        if pauses:
            self._is_paused = True
            return Turn("paused", at_ms, may_end=not self._has_turn_model)
        return None

    def _is_complete(self) -> bool:
        """Whether a model judges that the turn has ended with this pause."""
        model = turn_model.load() if self._has_turn_model else None
        return model is not None and model.is_complete(np.concatenate(self._heard))


class IdleTimeout:
    """Finds that the user has said nothing since the answer was played.

    Silence is measured in the sound that arrives: it becomes the user's turn.

    Attributes:
        start_ms: Where the silence starts in the sound of the session; None: it is not measured.
    """

    def __init__(self) -> None:
        self.start_ms: int | None = None
        self._played_at: float | None = None

    def start(self, played_at: float) -> None:
        """Measures the silence after an answer.

        Args:
            played_at: When the answer was played, or will be, as the time of the event loop.
        """
        self.start_ms, self._played_at = None, played_at

    def restart(self) -> None:
        """Measures what arrives from now on."""
        self.start_ms = None

    def stop(self) -> None:
        """Measures nothing until the next answer: the user, or the model, has the turn."""
        self.start_ms, self._played_at = None, None

    def feed(self, start_ms: int, end_ms: int, timeout_ms: int | None) -> bool:
        """
        Args:
            start_ms: Where the sound without speech that arrives now starts in that of the session.
            end_ms: Where it ends.
            timeout_ms: The `idle_timeout_ms` of the session.

        Returns:
            Whether the silence has lasted so long.
        """
        if self._played_at is None or timeout_ms is None or asyncio.get_running_loop().time() < self._played_at:
            return False
        if self.start_ms is None:
            self.start_ms = start_ms
        return end_ms - self.start_ms >= timeout_ms


def _ms(num_samples: int) -> int:
    return num_samples * 1000 // SAMPLE_RATE
