# SPDX-License-Identifier: Apache-2.0
"""The sound of a user that is not an item yet."""

from __future__ import annotations

from collections import deque

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
        self._pieces: deque[np.ndarray] = deque()
        self._start = 0
        self._num_samples = 0
        self._half_sample = b""

    @property
    def seconds(self) -> float:
        return self._num_samples / self.format.sample_rate

    @property
    def num_bytes(self) -> int:
        """The bytes of the sound, int16."""
        return 2 * self._num_samples

    def num_bytes_of(self, data: bytes) -> int:
        """The bytes that encoded sound takes here."""
        return 2 * len(data) // self.format.num_bytes

    @property
    def end_ms(self) -> int:
        """The position of its end."""
        return (self._start + self._num_samples) * 1000 // self.format.sample_rate

    def append(self, data: bytes) -> np.ndarray:
        """Appends encoded sound, whose pieces may end within a sample; returns the new samples, int16 `[n]`."""
        data = self._half_sample + data
        end = len(data) - len(data) % self.format.num_bytes
        self._half_sample = data[end:]
        samples = self.format.decode(data[:end])
        self._add(samples)
        return samples

    def _add(self, samples: np.ndarray) -> None:
        self._pieces.append(samples)
        self._num_samples += len(samples)

    def num_samples(self, until_ms: int) -> int:
        """The number of samples before a position."""
        return min(max(0, until_ms * self.format.sample_rate // 1000 - self._start), self._num_samples)

    def copy(self, until_ms: int) -> Sound:
        """What is before a position, and stays in the buffer."""
        samples = np.concatenate([np.zeros(0, np.int16), *self._pieces])
        return Sound(samples[: self.num_samples(until_ms)].copy(), self.format)

    def take(self, until_ms: int | None = None) -> Sound:
        """What is before a position, or all of it, which then is not in the buffer."""
        samples = np.concatenate([np.zeros(0, np.int16), *self._pieces])
        half_sample, size = self._half_sample, len(samples) if until_ms is None else self.num_samples(until_ms)
        self.clear()
        if until_ms is not None:
            rest = samples[size:].copy()
            self._start -= len(rest)
            self._half_sample = half_sample
            self._add(rest)
            samples = samples[:size].copy()
        return Sound(samples, self.format)

    def clear(self) -> None:
        self._start += self._num_samples
        self._num_samples, self._half_sample = 0, b""
        self._pieces.clear()

    def drop_before(self, at_ms: int) -> None:
        """Removes what is before a position."""
        self._drop(at_ms * self.format.sample_rate // 1000 - self._start)

    def keep_last(self, ms: int) -> None:
        """Removes all but the last milliseconds."""
        self._drop(self._num_samples - ms * self.format.sample_rate // 1000)

    def _drop(self, num_samples: int) -> None:
        if num_samples > 0:
            num_samples = min(num_samples, self._num_samples)
            self._start += num_samples
            self._num_samples -= num_samples
            while self._pieces and num_samples >= len(self._pieces[0]):
                num_samples -= len(self._pieces.popleft())
            if num_samples:
                self._pieces[0] = self._pieces[0][num_samples:]
