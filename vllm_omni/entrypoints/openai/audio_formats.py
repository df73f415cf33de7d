# SPDX-License-Identifier: Apache-2.0
"""Encodes samples as an audio file, at once or as they arrive.

Knows formats, not requests. Encoding takes processor time: call it in a thread beside the event loop, except for `pcm`
and `wav` without a change of speed.
"""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import av
import av.filter
import numpy as np
import torch
from av.audio.stream import AudioStream
from av.container import OutputContainer
from vllm.exceptions import VLLMServerError

AUDIO_FORMATS: dict[str, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
"""Media types by name. `pcm` and `pcm16`: 16-bit little-endian samples without a header, channels interleaved."""

MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_VOLUME = 10.0
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 8000, 48000
"""Hz; that a client may choose for its file."""

DEFAULT_SAMPLE_RATE = 24000
"""Hz; of speech, if a pipeline's configuration has no sample rate. Clients expect it of pcm."""

WAV_UNKNOWN_SIZE = 0xFFFFFFFF
"""The length in a WAV header if it is not known yet; players read to the end of the stream."""

_MIN_CODED_S = 0.1  # Decoders reject much shorter files of lossy codecs, and empty ones are not possible.
_BIT_RATE = 64_000  # of each channel
_LAYOUTS = {1: "mono", 2: "stereo"}  # Supported by all formats.


class BrokenAudioError(VLLMServerError, ValueError):
    """A model's audio cannot be encoded: an internal error."""


class AudioEncoder:
    """Encodes one clip while it is made. One caller at a time; `finish` is the last call.

    Attributes:
        sample_rate: Of the file, in Hz. A codec without the rate of the samples uses the next higher one.
        num_channels: Of the samples and of the file.
    """

    def __init__(
        self,
        format: str,
        sample_rate: int,
        speed: float = 1.0,
        *,
        num_channels: int = 1,
        is_whole: bool = False,
        file_rate: int | None = None,
        volume: float = 1.0,
    ) -> None:
        """
        Args:
            format: One of `AUDIO_FORMATS`.
            sample_rate: Of the samples, in Hz.
            speed: Factor of the speed, at the same pitch.
            num_channels: 1 or 2.
            is_whole: Return the whole file from `finish`, with its length in its headers.
            file_rate: The file's samples per second; None: those of the samples.
            volume: Factor of the samples, before they are clipped.

        Raises:
            ValueError: Unknown format, or a speed out of bounds.
            BrokenAudioError: Too many channels.
        """
        if format not in AUDIO_FORMATS:
            raise ValueError(f"unknown audio format {format!r}; there are {', '.join(AUDIO_FORMATS)}")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise ValueError(f"speed must be between {MIN_SPEED} and {MAX_SPEED}, not {speed}")
        if num_channels not in _LAYOUTS:
            raise BrokenAudioError(f"the model made audio of {num_channels} channels; a file has 1 or 2")
        codec = _CODECS.get(format)
        rate = file_rate or sample_rate
        rate = rate if codec is None else _codec_rate(codec.name, rate)
        self.sample_rate, self.num_channels = rate, num_channels
        self._volume = volume
        self._filter = None
        if speed != 1.0 or rate != sample_rate:
            self._filter = SpeechFilter(sample_rate, rate, speed, num_channels)
        self._is_quick = codec is None and self._filter is None and not is_whole
        self._coder: _PcmCoder | _WholeWavCoder | _FileCoder
        if codec is not None:
            self._coder = _FileCoder(codec, rate, num_channels, _WholeFile() if is_whole else _Pipe())
        elif format == "wav":
            self._coder = _WholeWavCoder(rate, num_channels) if is_whole else _PcmCoder(wav_header(rate, num_channels))
        else:
            self._coder = _PcmCoder()

    def encode(self, samples: np.ndarray) -> bytes:
        """
        Args:
            samples: float32 `[n]` or `[num_channels, n]`, clipped to [-1, 1] after the volume was changed.

        Returns:
            The bytes of the file that are ready; may be empty.

        Raises:
            BrokenAudioError: A sample is not a number, or the number of channels has changed.
        """
        samples = np.atleast_2d(np.asarray(samples, dtype=np.float32))
        if len(samples) != self.num_channels:
            raise BrokenAudioError(f"the model made audio of {len(samples)} channels after {self.num_channels}")
        check_samples(samples)
        if self._filter is not None:
            samples = self._filter.run(samples)
        return self._coder.encode(self._clipped(samples))

    def finish(self) -> bytes:
        """Returns the bytes of the file that were not returned before."""
        rest = b"" if self._filter is None else self._coder.encode(self._clipped(self._filter.finish()))
        return rest + self._coder.finish()

    def _clipped(self, samples: np.ndarray) -> np.ndarray:
        return np.clip(samples if self._volume == 1.0 else samples * np.float32(self._volume), -1.0, 1.0)

    async def encode_async(self, samples: np.ndarray) -> bytes:
        """`encode`, in a thread if it takes long."""
        return self.encode(samples) if self._is_quick else await asyncio.to_thread(self.encode, samples)

    async def finish_async(self) -> bytes:
        """`finish`, in a thread if it takes long."""
        return self.finish() if self._is_quick else await asyncio.to_thread(self.finish)


def check_samples(samples: np.ndarray) -> None:
    """Raises `BrokenAudioError` if a sample is not a number."""
    if not np.isfinite(samples).all():
        raise BrokenAudioError("the model made audio with samples that are not numbers (NaN or infinite)")


def encode_audio(samples: np.ndarray, format: str, sample_rate: int, speed: float = 1.0) -> bytes:
    """A whole file, with its length in its headers.

    Args:
        samples: float32 `[n]` or `[channels, n]`. Other arguments and errors: see `AudioEncoder`.
    """
    encoder = AudioEncoder(format, sample_rate, speed, num_channels=count_channels(samples), is_whole=True)
    return encoder.encode(samples) + encoder.finish()


def count_channels(samples: np.ndarray) -> int:
    """The number of channels of `[n]` or `[channels, n]`."""
    return 1 if samples.ndim == 1 else len(samples)


def wav_header(sample_rate: int, num_channels: int, num_bytes: int | None = None) -> bytes:
    """The 44 bytes before `num_bytes` of 16-bit samples; None: not known yet."""
    frame_size = 2 * num_channels
    sizes = (WAV_UNKNOWN_SIZE,) * 2 if num_bytes is None else (36 + num_bytes, num_bytes)
    riff = struct.pack("<4sI4s", b"RIFF", sizes[0], b"WAVE")
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, num_channels, sample_rate, frame_size * sample_rate, frame_size, 16
    )
    return riff + form + struct.pack("<4sI", b"data", sizes[1])


def first_clip(audio: torch.Tensor) -> np.ndarray:
    """A stage's `audio` as samples to encode.

    Args:
        audio: `[samples]` or `[channels, samples]`, or of a diffusion stage `[n, channels, samples]`.

    Returns:
        float32 `[samples]`, or `[channels, samples]` of the first of the n.
    """
    return (audio if audio.ndim < 3 else audio[0]).float().numpy()


def to_pcm16(samples: np.ndarray) -> np.ndarray:
    """float32 `[n]` or `[channels, n]` in [-1, 1] -> int16 `[n * channels]`, little-endian, channels interleaved.

    1.0 becomes the largest value.
    """
    return np.clip(np.rint(_interleave(samples) * 32768.0), -32768, 32767).astype("<i2")


def _interleave(samples: np.ndarray) -> np.ndarray:
    """`[n]` or `[channels, n]` -> `[n * channels]`"""
    return samples.T.reshape(-1)


@dataclass(frozen=True)
class _Codec:
    """PyAV's names of a codec, of its container and of its sample format."""

    name: str
    container: str
    sample_format: str
    is_lossy: bool = True
    options: dict[str, str] = field(default_factory=dict)


_CODECS = {
    # Without a tag, so that a client can join files: decoders fail on one between two sounds.
    "mp3": _Codec("libmp3lame", "mp3", "s16p", options={"id3v2_version": "0"}),
    "aac": _Codec("aac", "adts", "fltp"),
    # A page for each packet: else a streaming client gets the audio in pieces of a second.
    "opus": _Codec("libopus", "ogg", "s16", options={"page_duration": "20000"}),
    "flac": _Codec("flac", "flac", "s16", is_lossy=False, options={"metadata_header_padding": "0"}),
}


def _codec_rate(codec: str, sample_rate: int) -> int:
    """The lowest rate of a codec that loses nothing, else its highest."""
    rates = av.Codec(codec, "w").audio_rates
    if rates is None or sample_rate in rates:
        return sample_rate
    return min((rate for rate in rates if rate > sample_rate), default=max(rates))


class _PcmCoder:
    """16-bit samples after a header."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header

    def encode(self, samples: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        return header + to_pcm16(samples).tobytes()

    def finish(self) -> bytes:
        return self._header


class _WholeWavCoder:
    """16-bit samples after a WAV header with their number."""

    def __init__(self, sample_rate: int, num_channels: int) -> None:
        self._sample_rate, self._num_channels = sample_rate, num_channels
        self._parts: list[bytes] = []

    def encode(self, samples: np.ndarray) -> bytes:
        self._parts.append(to_pcm16(samples).tobytes())
        return b""

    def finish(self) -> bytes:
        pcm = b"".join(self._parts)
        return wav_header(self._sample_rate, self._num_channels, len(pcm)) + pcm


class _Pipe:
    """A file to write to; `take` returns the new bytes. Without `seek`, so that PyAV does not rewrite headers."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self, is_end: bool) -> bytes:
        data, self._written = b"".join(self._written), []
        return data


class _WholeFile(io.BytesIO):
    """A file to write to; `take` returns all bytes at the end."""

    def take(self, is_end: bool) -> bytes:
        return self.getvalue() if is_end else b""


class _FileCoder:
    """A codec in a container."""

    def __init__(self, codec: _Codec, sample_rate: int, num_channels: int, sink: _Pipe | _WholeFile) -> None:
        self._sink = sink
        self._num_channels = num_channels
        self._num_missing = int(_MIN_CODED_S * sample_rate) if codec.is_lossy else 0
        self._container: OutputContainer = av.open(
            sink, "w", format=codec.container, options={"flush_packets": "1", **codec.options}
        )
        self._stream = cast(AudioStream, self._container.add_stream(codec.name, rate=sample_rate))
        context = self._stream.codec_context
        context.layout, context.format = _LAYOUTS[num_channels], codec.sample_format
        if codec.is_lossy:
            context.bit_rate = _BIT_RATE * num_channels
        self._container.start_encoding()

    def encode(self, samples: np.ndarray) -> bytes:
        if samples.size:
            self._num_missing -= samples.shape[1]
            self._mux(_as_frame(to_pcm16(samples), "s16", self._num_channels, self._stream.codec_context.sample_rate))
        return self._sink.take(False)

    def finish(self) -> bytes:
        rest = self.encode(np.zeros((self._num_channels, max(0, self._num_missing)), np.float32))
        self._mux(None)
        self._container.close()
        return rest + self._sink.take(True)

    def _mux(self, frame: av.AudioFrame | None) -> None:
        self._container.mux(self._stream.encode(frame))


class SpeechFilter:
    """Another speed at the same pitch, and another sample rate."""

    def __init__(self, sample_rate: int, to_rate: int, speed: float, num_channels: int) -> None:
        self._sample_rate, self._num_channels = sample_rate, num_channels
        self._is_used = False
        self._graph = graph = av.filter.Graph()
        graph.threads = 1
        layout = _LAYOUTS[num_channels]
        nodes = [graph.add_abuffer(sample_rate=sample_rate, format="flt", layout=layout, time_base=None)]
        nodes += [graph.add("atempo", repr(factor)) for factor in _tempo_factors(speed)]
        if to_rate != sample_rate:
            nodes.append(graph.add("aresample", str(to_rate)))
        nodes.append(graph.add("abuffersink"))
        graph.link_nodes(*nodes).configure()

    def run(self, samples: np.ndarray) -> np.ndarray:
        """float32 `[channels, n]` -> float32 `[channels, m]`, what is ready."""
        if not samples.size:
            return samples
        self._is_used = True
        self._graph.push(_as_frame(_interleave(samples), "flt", self._num_channels, self._sample_rate))
        return self._pull()

    def finish(self) -> np.ndarray:
        """float32 `[channels, m]`, the rest."""
        if not self._is_used:
            return self._nothing()
        self._graph.push(None)
        return self._pull()

    def _pull(self) -> np.ndarray:
        return np.concatenate([self._nothing(), *self._pulled()], axis=1)

    def _nothing(self) -> np.ndarray:
        return np.zeros((self._num_channels, 0), np.float32)

    def _pulled(self) -> Iterator[np.ndarray]:
        with suppress(BlockingIOError, EOFError):  # No more samples are ready; the end.
            while True:
                yield self._graph.pull().to_ndarray().reshape(-1, self._num_channels).T


def _tempo_factors(speed: float) -> list[float]:
    """Factors of `speed` from 0.5 to 2, the range in which the filter drops no samples."""
    if speed == 1.0:
        return []
    return [speed] if 0.5 <= speed <= 2.0 else [speed**0.5] * 2


def _as_frame(interleaved: np.ndarray, format: str, num_channels: int, sample_rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(interleaved[None], format=format, layout=_LAYOUTS[num_channels])
    frame.sample_rate = sample_rate
    return frame
