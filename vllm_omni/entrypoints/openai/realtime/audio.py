# SPDX-License-Identifier: Apache-2.0
"""Sound of a realtime session: the formats of its input and output. Knows no events."""

from __future__ import annotations

import numpy as np

from vllm_omni.entrypoints.openai.audio_formats import SpeechFilter, to_pcm16

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
