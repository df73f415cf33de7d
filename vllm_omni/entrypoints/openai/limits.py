# SPDX-License-Identifier: Apache-2.0
"""How much a single request may make the server read and hold: the flags, and the values they give.

Knows nothing of how the limits are kept (`middleware.py`, `media_connector.py`).
"""

import argparse
from contextvars import ContextVar
from dataclasses import dataclass, fields

from vllm.exceptions import VLLMValidationError

MIB = 1 << 20


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


_HELP = {
    "max_request_bytes": "Bytes of a request's body; a larger one is answered with 413.",
    "max_media_parts": "Images, audio clips and videos that a request may have, all together.",
    "max_media_bytes": "Bytes of one image, audio clip or video as it is sent or fetched.",
    "max_image_pixels": "Pixels of an image.",
    "max_video_pixels": "Pixels of a frame of a video that is sent.",
    "max_video_seconds": "Length of a video that is sent, in seconds.",
}


def add_limit_arguments(group: argparse._ActionsContainer) -> None:
    """Adds a flag for each limit; its default is that of `RequestLimits`."""
    for field in fields(RequestLimits):
        group.add_argument(
            flag(field.name),
            type=_positive_float if field.type is float else _positive_int,
            default=field.default,
            help=_HELP[field.name],
        )


def limits_from(args: argparse.Namespace) -> RequestLimits:
    """The limits that the flags of `add_limit_arguments` gave; the defaults where a program has not got these flags."""
    given = vars(args)
    return RequestLimits(**{field.name: given[field.name] for field in fields(RequestLimits) if field.name in given})


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
