# SPDX-License-Identifier: Apache-2.0
"""Looks at media before it is decoded: what it is, and how much would come out of it.

FFmpeg opens whatever it recognizes, and of some formats (playlists) it depends on its build whether they make it open
other files and hosts. So only containers that hold their media themselves get to it. Knows nothing of where
the bytes come from.
"""

import logging
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import pybase64
from PIL import Image
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.base import MediaIO

from vllm_omni.entrypoints.openai.limits import RequestLimits, flag

logger = logging.getLogger("vllm.omni.server")

_ID3 = b"ID3"
# What a file begins with, and where.
_CONTAINERS: tuple[tuple[int, bytes], ...] = (
    (0, b"RIFF"),  # WAV, AVI
    (0, b"RF64"),
    (0, b"fLaC"),
    (0, b"OggS"),  # Vorbis, Opus, Theora
    (0, b"\x1a\x45\xdf\xa3"),  # Matroska, WebM
    (0, b"FORM"),  # AIFF
    (0, b"caff"),
    (0, b".snd"),
    (0, b"#!AMR"),
    (0, b"FLV"),
    (0, b"GIF8"),
    (0, b"\x00\x00\x01\xba"),  # MPEG program stream
    (0, b"\x00\x00\x01\xb3"),
    (0, b"\x30\x26\xb2\x75"),  # ASF, WMV
    *((4, box) for box in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")),  # MP4, QuickTime
)
_CONTAINER_NAMES = "WAV, MP3, FLAC, Ogg, AAC, MP4, WebM, Matroska, AVI, QuickTime, MPEG, AIFF, FLV, GIF, ..."


def kind_of(media_io: MediaIO) -> str:
    """`image`, `audio` or `video`."""
    for media_type, kind in ((ImageMediaIO, "image"), (AudioMediaIO, "audio"), (VideoMediaIO, "video")):
        if isinstance(media_io, media_type):
            return kind
    raise TypeError(f"no media of a request is read by {type(media_io).__name__}")


class GuardedMediaIO(MediaIO[Any]):
    """vLLM's reader of one kind of media, behind the limits. Whatever cannot be read is the client's error.

    Args:
        media_io: Reads what is let through.
        limits: What is let through.
        label: What the client shall recognize the media by, for messages.
    """

    def __init__(self, media_io: MediaIO, limits: RequestLimits, label: str) -> None:
        self._media_io = media_io
        self._limits = limits
        self._label = label
        self._parameter = f"{kind_of(media_io)}_url"
        self._check = {"image": self._check_image, "audio": check_container, "video": self._check_video}[
            kind_of(media_io)
        ]
        if isinstance(media_io, VideoMediaIO):  # A video may be a list of pictures.
            media_io.image_io = GuardedMediaIO(media_io.image_io, limits, label)  # type: ignore[assignment]

    def get_max_bytes(self) -> int:
        own = self._media_io.get_max_bytes()
        return self._limits.max_media_bytes if own is None else min(own, self._limits.max_media_bytes)

    def load_bytes(self, data: bytes) -> Any:
        """
        Raises:
            VLLMValidationError: It is too large, or not what it should be, or broken.
        """
        self._check_num_bytes(len(data))

        def load() -> Any:
            self._check(data)
            media = self._media_io.load_bytes(data)
            if isinstance(self._media_io, VideoMediaIO) and not len(media.media[0]):
                raise ValueError("none of its frames can be decoded")
            return media

        return self._reported(load)

    def load_base64(self, media_type: str, data: str) -> Any:
        self._check_num_bytes(len(data) * 3 // 4)
        if media_type.lower() == "video/jpeg":
            return self._reported(lambda: self._media_io.load_base64(media_type, data))
        return self.load_bytes(self._reported(lambda: pybase64.b64decode(data, validate=True)))

    def load_file(self, filepath: Path) -> Any:
        def read() -> bytes:
            if not filepath.is_file():  # Nor would a pipe or a device ever end.
                raise ValueError("there is no such file")
            self._check_num_bytes(filepath.stat().st_size)
            return filepath.read_bytes()

        return self.load_bytes(self._reported(read))

    def _reported(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except (VLLMClientError, ImportError, MemoryError):
            raise
        except Exception as error:  # Decoders raise whatever they like (SyntaxError, cv2.error, struct.error, ...).
            logger.debug("%s cannot be read", self._label, exc_info=True)
            raise self._refusal(f"cannot be read: {error}") from error

    def _refusal(self, reason: str) -> VLLMValidationError:
        return VLLMValidationError(f"{self._label} {reason}", parameter=self._parameter)

    def _check_num_bytes(self, num_bytes: int) -> None:
        limit = self.get_max_bytes()
        if num_bytes > limit:
            raise self._refusal(f"has more than {limit} bytes, which is the limit ({flag('max_media_bytes')})")

    def _check_image(self, data: bytes) -> None:
        """Reads the header only. Pillow's own limit is far above ours."""
        with open_image(BytesIO(data)) as image:
            self._check_pixels(image, self._limits.max_image_pixels, "max_image_pixels")

    def _check_video(self, data: bytes) -> None:
        """Reads the header only."""
        check_container(data)
        with av.open(BytesIO(data)) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            stream = container.streams.video[0]
            self._check_pixels(stream, self._limits.max_video_pixels, "max_video_pixels")
            seconds = (container.duration or 0) / av.time_base
            if stream.duration and stream.time_base:
                seconds = max(seconds, float(stream.duration * stream.time_base))
        if seconds > self._limits.max_video_seconds:
            limit = f"{self._limits.max_video_seconds:g} s, which is the limit ({flag('max_video_seconds')})"
            raise self._refusal(f"lasts {seconds:.0f} s, more than {limit}")

    def _check_pixels(self, picture: "Image.Image | av.VideoStream", limit: int, name: str) -> None:
        if picture.width * picture.height > limit:
            size = f"{picture.width}x{picture.height}"
            raise self._refusal(f"is {size}, more than {limit} pixels, which is the limit ({flag(name)})")


def check_container(data: bytes) -> None:
    """
    Raises:
        ValueError: This is not a file of a format that holds its sound and pictures itself.
    """
    start = _after_tags(data)
    head = data[start : start + 16]
    is_known = any(head[at : at + len(mark)] == mark for at, mark in _CONTAINERS)
    # MP3 and AAC begin with a frame, whose first 11 bits are set; an MPEG transport stream has packets of 188 bytes.
    is_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    is_transport = head[:1] == b"G" and data[start + 188 : start + 189] == b"G"
    if not (is_known or is_frame or is_transport):
        raise ValueError(f"it is in none of the known formats ({_CONTAINER_NAMES})")


def _after_tags(data: bytes) -> int:
    """Where a file begins after its ID3 tags, which FFmpeg skips when it looks what a file is."""
    start = 0
    while data[start : start + 3] == _ID3 and len(data) >= start + 10:
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size
        while data[start : start + 1] == b"\0":  # Some writers do not count their padding.
            start += 1
    return start
