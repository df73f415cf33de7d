# SPDX-License-Identifier: Apache-2.0
"""The sound of a user that is not an item yet."""

from __future__ import annotations

import numpy as np

from vllm_omni.entrypoints.openai.realtime.audio import SoundFormat
from vllm_omni.entrypoints.openai.realtime.conversation import Sound


class InputBuffer:
    """Sound in the order of its arrival; positions are milliseconds of all sound that ever arrived.

    Attributes:
        format: Of the sound.
    """

    def __init__(self, sound_format: SoundFormat) -> None:
        self.format = sound_format
        self._pieces: list[np.ndarray] = []
        self._start = 0
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        return self._num_samples / self.format.sample_rate

    @property
    def end_ms(self) -> int:
        """The position of its end."""
        return (self._start + self._num_samples) * 1000 // self.format.sample_rate

    def append(self, samples: np.ndarray) -> None:
        """
        Args:
            samples: int16 `[n]`.
        """
        self._pieces.append(samples)
        self._num_samples += len(samples)

    def take(self, until_ms: int | None = None) -> Sound:
        """What is before a position, or all of it, which then is not in the buffer."""
        samples = np.concatenate([np.zeros(0, np.int16), *self._pieces])
        self.clear()
        if until_ms is not None:
            size = max(0, until_ms * self.format.sample_rate // 1000 - self._start + len(samples))
            rest = samples[size:]
            self._start -= len(rest)
            self.append(rest)
            samples = samples[:size].copy()
        return Sound(samples, self.format)

    def clear(self) -> None:
        self._start += self._num_samples
        self._pieces, self._num_samples = [], 0

    def drop_before(self, at_ms: int) -> None:
        """Removes what is before a position."""
        self._drop(at_ms * self.format.sample_rate // 1000 - self._start)

    def keep_last(self, ms: int) -> None:
        """Removes all but the last milliseconds."""
        self._drop(self._num_samples - ms * self.format.sample_rate // 1000)

    def _drop(self, num_samples: int) -> None:
        if num_samples > 0:
            rest = np.concatenate([np.zeros(0, np.int16), *self._pieces])[num_samples:].copy()
            self._start += min(num_samples, self._num_samples)
            self._pieces, self._num_samples = [rest], len(rest)
