# SPDX-License-Identifier: Apache-2.0
"""HTML of texts, sounds, pictures and videos for notebooks. Texts are escaped, media are data URIs: a page needs no
files, no network and no script. `MediaBudget` bounds its size."""

import base64
import html
import io
import wave
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from vllm_omni.media import encode_mp4, to_pil, to_uint8

MAX_MEDIA_BYTES = 8 << 20
"""Bytes of the media of one output, before base64: 170 s of speech at 24 kHz, or some ten pictures."""
MAX_TEXT_CHARS = 20_000
"""Characters of each text of an output."""
MAX_ITEMS = 16
"""Texts of an output that are shown; also of its pictures, videos, clips and tensors."""
_MAX_SIDE = 768  # pixels of a picture: a larger one is shown smaller
_MAX_VIDEO_VALUES = 1 << 28  # values of the frames that are encoded: 10 s of 720p take some seconds
_CHANNELS = (1, 3, 4)

Item = TypeVar("Item")


class MediaBudget:
    """What may still be embedded. Its methods return the HTML of one medium, or a line that says what is left out."""

    def __init__(self, num_bytes: int = MAX_MEDIA_BYTES) -> None:
        self._left = num_bytes

    def sound(self, samples: torch.Tensor, sample_rate: int | None) -> str:
        """
        Args:
            samples: float32 `[samples]` or `[channels, samples]` in [-1, 1]. What does not fit is cut off.
            sample_rate: Hz.
        """
        channels = samples.reshape(1, -1) if samples.ndim < 2 else samples
        if sample_rate is None or channels.ndim != 2 or not channels.numel():
            return note(f"sound of shape {tuple(samples.shape)}, {sample_rate or 'unknown'} Hz: no player")
        num_samples = channels.shape[1]
        fits = min(num_samples, self._left // (2 * len(channels)))
        seconds = num_samples / sample_rate
        if not fits:
            return note(f"{seconds:.1f} s of sound are not shown: too large")
        file = to_wav(channels[:, :fits], sample_rate)
        cut = "" if fits == num_samples else f", of which the player has the first {fits / sample_rate:.1f} s"
        player = f'<audio controls preload="metadata" src="{self._embed(file, "audio/wav")}"></audio>'
        return player + note(f"{seconds:.1f} s, {sample_rate:,} Hz{cut}")

    def picture(self, image: Any) -> str:
        """
        Args:
            image: A PIL image, a float32 array `[height, width, channels]` in [0, 1], or the bytes of a file.
        """
        if isinstance(image, bytes):
            kind = "jpeg" if image[:2] == b"\xff\xd8" else "webp" if image[8:12] == b"WEBP" else "png"
            return self._picture(image, f"image/{kind}")
        if isinstance(image, Image.Image):
            small = image.copy()
        elif isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[-1] in _CHANNELS and image.size:
            small = to_pil(to_uint8(torch.from_numpy(image)))
        else:
            return note(describe("picture", image))
        small.thumbnail((_MAX_SIDE, _MAX_SIDE))
        file = io.BytesIO()
        small.save(file, "PNG")
        return self._picture(file.getvalue(), "image/png")

    def video(self, video: Any, sound: torch.Tensor | None, fps: float | None, sample_rate: int | None) -> str:
        """
        Args:
            video: The bytes of an MP4 file, a float32 array `[frames, height, width, channels]`, or PIL images.
            sound: Of a video that is not a file: float32 `[channels, samples]`.
        """
        if isinstance(video, list) and video and isinstance(video[0], Image.Image):
            video = np.stack([np.asarray(frame.convert("RGB"), dtype=np.float32) / 255 for frame in video])
        if isinstance(video, np.ndarray) and video.ndim == 4 and video.shape[-1] in _CHANNELS and video.size and fps:
            if video.size > _MAX_VIDEO_VALUES:
                return self.picture(video[0]) + note(f"the first of {len(video)} frames: the video is too large")
            has_sound = sound is not None and sound.ndim == 2 and len(sound) in (1, 2) and sample_rate is not None
            video = encode_mp4(torch.from_numpy(video), fps, sound if has_sound else None, sample_rate)
        if not isinstance(video, bytes):
            return note(describe("video", video))
        if len(video) > self._left:
            return note(f"a video of {len(video):,} bytes is not shown: too large")
        return f'<video controls loop style="max-width:100%" src="{self._embed(video, "video/mp4")}"></video>'

    def _picture(self, file: bytes, kind: str) -> str:
        if len(file) > self._left:
            return note(f"a picture of {len(file):,} bytes is not shown: too large")
        return f'<img style="max-width:{_MAX_SIDE}px;margin:2px" src="{self._embed(file, kind)}">'

    def _embed(self, file: bytes, kind: str) -> str:
        self._left -= len(file)
        return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def to_wav(samples: torch.Tensor, sample_rate: int) -> bytes:
    """A WAV file of 16 bits.

    Args:
        samples: float32 `[channels, samples]`, clipped to [-1, 1]; NaN is silence.
        sample_rate: Hz.
    """
    values = np.nan_to_num(samples.T.float().numpy()).clip(-1, 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(len(samples))
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes((values * 32767).astype("<i2").tobytes())
    return file.getvalue()


def paragraph(text: str) -> str:
    """Text with its line ends, as nothing but text; the end of a long one is left out."""
    rest = len(text) - MAX_TEXT_CHARS
    shown = html.escape(text[:MAX_TEXT_CHARS])
    end = note(f"{rest:,} further characters") if rest > 0 else ""
    return f'<div style="white-space:pre-wrap">{shown}</div>{end}'


def note(text: str) -> str:
    """A line about an output."""
    return f'<div style="opacity:.6;font-size:85%">{html.escape(text[:MAX_TEXT_CHARS])}</div>'


def show_all(items: Sequence[Item], show: Callable[[Item], str], name: str) -> list[str]:
    """The HTML of each of the first `MAX_ITEMS` items, and how many `name` are left out."""
    rest = len(items) - MAX_ITEMS
    return [*map(show, items[:MAX_ITEMS]), *([note(f"{rest} further {name}")] if rest > 0 else [])]


def describe(name: str, value: Any) -> str:
    """Name, type and shape."""
    shape = tuple(getattr(value, "shape", ()))
    return f"{name}: {type(value).__name__} {str(getattr(value, 'dtype', '')).removeprefix('torch.')} {list(shape)}"


def block(parts: Iterable[str]) -> str:
    return f'<div style="margin:.5em 0">{"".join(parts)}</div>'
