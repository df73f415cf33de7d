# SPDX-License-Identifier: Apache-2.0
"""How much a request may make the server read, and how much the server holds: the flags, and the values they give.

Knows nothing of how the limits are kept (`middleware.py`, `media_connector.py`, `video_store.py`).
"""

import argparse
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from vllm.exceptions import VLLMValidationError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request. Whoever exceeds one is told which flag raises it.

    The length of audio clips is bounded by vLLM's own variables: VLLM_MAX_AUDIO_DECODE_DURATION_S (600),
    VLLM_MAX_AUDIO_DECODE_BYTES (256 MiB) and VLLM_MAX_AUDIO_CLIP_FILESIZE_MB (25).

    Attributes:
        max_request_bytes: Bytes of a request's body.
        max_media_parts: Images, audio clips and videos of a request, all together.
        max_media_bytes: Bytes of one of them as it is sent or fetched, before it is decoded.
        max_image_pixels: Pixels of an image. The default is an 8K picture.
        max_video_pixels: Pixels of a video's frame. The default is a 4K frame.
        max_video_seconds: Length of a video.
    """

    max_request_bytes: int = 256 * MIB
    max_media_parts: int = 64
    max_media_bytes: int = 128 * MIB
    max_image_pixels: int = 8192 * 4320
    max_video_pixels: int = 4096 * 2304
    max_video_seconds: float = 600.0


@dataclass(frozen=True)
class ServerLimits:
    """Limits of what the server holds for all requests together.

    Attributes:
        max_total_request_bytes: Bytes of the bodies of all requests that have not been answered in full.
        video_dir: An existing directory for the files of videos; None: the system's for temporary files.
        max_stored_videos: Video jobs that are kept. For a new one the oldest that has ended is removed.
        max_stored_video_bytes: Bytes of all video files. For a new one the oldest are removed.
        video_expires_after_s: Seconds that a video job is kept after it has ended.
    """

    max_total_request_bytes: int = 2 * GIB
    video_dir: str | None = None
    max_stored_videos: int = 1000
    max_stored_video_bytes: int = 8 * GIB
    video_expires_after_s: float = 3600.0


Limits = TypeVar("Limits", RequestLimits, ServerLimits)

_HELP = {
    "max_request_bytes": "Bytes of a request's body; a larger one is answered with 413.",
    "max_media_parts": "Images, audio clips and videos that a request may have, all together.",
    "max_media_bytes": "Bytes of one image, audio clip or video as it is sent or fetched.",
    "max_image_pixels": "Pixels of an image.",
    "max_video_pixels": "Pixels of a frame of a video that is sent.",
    "max_video_seconds": "Length of a video that is sent, in seconds.",
    "max_total_request_bytes": "Bytes of the bodies of all requests that have not been answered in full; requests "
    "beyond that are answered with 429. At least --max-request-bytes.",
    "video_dir": "Existing directory for the files of generated videos. Default: the system's for temporary files.",
    "max_stored_videos": "Video jobs that are kept; for a new one the oldest that has ended is removed.",
    "max_stored_video_bytes": "Bytes of all files of generated videos; for a new one the oldest are removed.",
    "video_expires_after_s": "Seconds that a video job and its file are kept after it has ended.",
}


def add_limit_arguments(group: argparse._ActionsContainer) -> None:
    """Adds a flag for each limit; its default is that of `RequestLimits` or `ServerLimits`."""
    for field in (*fields(RequestLimits), *fields(ServerLimits)):
        group.add_argument(flag(field.name), type=_PARSERS[field.type], default=field.default, help=_HELP[field.name])


def limits_from(args: argparse.Namespace, kind: type[Limits]) -> Limits:
    """The limits that the flags of `add_limit_arguments` gave; the defaults where a program has not got these flags."""
    given = vars(args)
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


def check_limits(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: Two limits contradict each other.
    """
    largest = limits_from(args, RequestLimits).max_request_bytes
    total = limits_from(args, ServerLimits).max_total_request_bytes
    if total < largest:
        raise ValueError(
            f"{flag('max_total_request_bytes')} {total} is less than {flag('max_request_bytes')} {largest}: the "
            "largest request could never be read; raise the first or lower the second"
        )


def flag(name: str) -> str:
    """The flag that sets a limit, for messages."""
    return "--" + name.replace("_", "-")


class MediaCount:
    """Counts the media parts of one request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def take(self) -> int:
        """Counts one more; says which one it is, from 1.

        Raises:
            VLLMValidationError: The request has more than it may have.
        """
        self._count += 1
        if self._count > self._limit:
            raise VLLMValidationError(
                f"a request may have {self._limit} images, audio clips and videos ({flag('max_media_parts')}), "
                "and this one has more",
                parameter="messages",
            )
        return self._count


# Set for each HTTP request, so that whoever loads media for it, in whatever task, counts for the same request.
media_count: ContextVar[MediaCount] = ContextVar("media_count")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def _directory(text: str) -> str:
    if not os.path.isdir(text) or not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"must be an existing directory that the server can write to, not {text!r}")
    return text


_PARSERS: dict[Any, Callable[[str], Any]] = {int: _positive_int, float: _positive_float, str | None: _directory}
