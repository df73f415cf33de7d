# SPDX-License-Identifier: Apache-2.0
"""Sound of a realtime session: its formats, what a user says, and what is played. Knows no events."""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from vllm import envs
from vllm.utils import random_uuid

from vllm_omni.entrypoints.openai import media_input
from vllm_omni.entrypoints.openai.audio_formats import SpeechFilter, to_pcm16, wav_header

MIN_SPEED, MAX_SPEED = 0.25, 1.5

_BIAS = 0x84  # of G.711 mu-law


def _ulaw_values() -> np.ndarray:
    """int16 `[256]`: the sample of each code (ITU-T G.711)."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = ((((code & 0x0F) << 3) + _BIAS) << ((code & 0x70) >> 4)) - _BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


def _alaw_values() -> np.ndarray:
    """int16 `[256]`: the sample of each code (ITU-T G.711)."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    segment = (code & 0x70) >> 4
    step = ((code & 0x0F) << 4) + np.where(segment == 0, 0x08, 0x108)
    magnitude = step << np.maximum(segment - 1, 0)
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.int16)


class _G711:
    """One byte for each sample, by a table; a sample gets the code with the nearest value."""

    sample_rate = 8000
    num_bytes = 1

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        codes = np.argsort(values, kind="stable")
        ordered = values[codes].astype(np.int32)
        middles = (ordered[:-1] + ordered[1:]) / 2
        samples = np.arange(-32768, 32768)
        self._codes = codes[np.searchsorted(middles, samples)].astype(np.uint8)

    def decode(self, data: bytes) -> np.ndarray:
        return self._values[np.frombuffer(data, np.uint8)]

    def encode(self, samples: np.ndarray) -> bytes:
        return self._codes[samples.astype(np.int32) + 32768].tobytes()


class _Pcm16:
    """Little-endian samples of 16 bits."""

    sample_rate = 24000
    num_bytes = 2

    def decode(self, data: bytes) -> np.ndarray:
        """int16 `[n]`."""
        return np.frombuffer(data, "<i2")

    def encode(self, samples: np.ndarray) -> bytes:
        """Encodes int16 `[n]`."""
        return samples.astype("<i2").tobytes()


SoundFormat = _Pcm16 | _G711

FORMATS: dict[str, SoundFormat] = {
    "audio/pcm": _Pcm16(),
    "audio/pcmu": _G711(_ulaw_values()),
    "audio/pcma": _G711(_alaw_values()),
}
"""By OpenAI's names. Mono: 16 bits at 24 kHz, G.711 mu-law and A-law at 8 kHz."""


@dataclass
class Sound:
    """What a user said.

    Attributes:
        samples: int16 `[n]`.
        text: What the model reads in its place: an ASR stage's text. None: it hears it, or the text is not known yet.
        num_spoken: The samples before its last pause, which are all that a model reads of it; None: all of them.
        address: Names it in messages, where only its session can use it.
    """

    samples: np.ndarray
    format: SoundFormat
    text: str | None = None
    num_spoken: int | None = None
    address: str = field(default_factory=lambda: f"sound:{random_uuid()}")

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.format.sample_rate

    @property
    def spoken(self) -> np.ndarray:
        """What a model reads of it: int16 `[n]`."""
        return self.samples[: self.num_spoken]

    @property
    def url(self) -> str:
        """The sound's address in messages; where another connector of vLLM's reads these, a WAV file of it."""
        if envs.VLLM_MEDIA_CONNECTOR == media_input.CONNECTOR_NAME:
            return self.address
        pcm = self.spoken.astype("<i2").tobytes()
        wav = wav_header(self.format.sample_rate, 1, len(pcm)) + pcm
        return "data:audio/wav;base64," + base64.b64encode(wav).decode()

    def decoded(self) -> tuple[np.ndarray, float]:
        """What a model reads of it: float32 `[n]` in [-1, 1], and its samples per second."""
        return self.spoken.astype(np.float32) / 32768.0, self.format.sample_rate


class InputBuffer:
    """The sound of a user that is not an item yet, in the order of its arrival. Positions are milliseconds of all sound
    that ever arrived.

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
        self._pieces.append(samples)
        self._num_samples += len(samples)
        return samples

    def num_samples(self, until_ms: int) -> int:
        """The number of samples before a position."""
        return min(max(0, until_ms * self.format.sample_rate // 1000 - self._start), self._num_samples)

    def copy(self, until_ms: int | None = None) -> Sound:
        """What is before a position, or all of it; it stays in the buffer."""
        samples = np.concatenate([np.zeros(0, np.int16), *self._pieces])
        return Sound(samples if until_ms is None else samples[: self.num_samples(until_ms)].copy(), self.format)

    def take(self, until_ms: int | None = None) -> Sound:
        """What is before a position, or all of it, which then is not in the buffer."""
        sound = self.copy(until_ms)
        if until_ms is None:
            self.clear()
        else:
            self._drop(len(sound.samples))
        return sound

    def clear(self) -> None:
        self._start += self._num_samples
        self._num_samples, self._half_sample = 0, b""
        self._pieces.clear()

    def drop_before(self, at_ms: int) -> None:
        """Removes what is before a position."""
        self._drop(self.num_samples(at_ms))

    def keep_last(self, ms: int) -> None:
        """Removes all but the last milliseconds."""
        self._drop(self._num_samples - ms * self.format.sample_rate // 1000)

    def _drop(self, num_samples: int) -> None:
        num_samples = max(0, num_samples)
        self._start += num_samples
        self._num_samples -= num_samples
        while num_samples and num_samples >= len(self._pieces[0]):
            num_samples -= len(self._pieces.popleft())
        if num_samples:
            self._pieces[0] = self._pieces[0][num_samples:].copy()  # A view would keep all that came with it.


class OutputSound:
    """The speech of a response in the format that the client plays, piece by piece."""

    def __init__(self, name: str, sample_rate: int, speed: float) -> None:
        """
        Args:
            name: One of `FORMATS`.
            sample_rate: Of the model's speech, in Hz.
            speed: Factor of the speed, at the same pitch.
        """
        self.format = FORMATS[name]
        self._filter: SpeechFilter | None = None
        if speed != 1.0 or sample_rate != self.format.sample_rate:
            self._filter = SpeechFilter(sample_rate, self.format.sample_rate, speed, 1)

    def encode(self, samples: np.ndarray) -> bytes:
        """float32 `[n]` or `[channels, n]` at the model's rate -> the bytes that are ready, of one channel."""
        samples = samples if samples.ndim == 1 else samples.mean(axis=0)
        if self._filter is not None:
            samples = self._filter.run(samples[None])
        return self.format.encode(to_pcm16(samples))

    def finish(self) -> bytes:
        """Returns the encoded samples that were not returned before."""
        return b"" if self._filter is None else self.format.encode(to_pcm16(self._filter.finish()))

    def seconds(self, data: bytes) -> float:
        return len(data) / (self.format.num_bytes * self.format.sample_rate)
