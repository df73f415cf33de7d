# SPDX-License-Identifier: Apache-2.0
"""The times of a transcript: segments of words, and segments as subtitles."""

from collections.abc import Callable, Sequence
from typing import Any

_PAUSE_S = 0.6
"""Between two words that are in different segments."""
_LONGEST_S = 6.0
"""Of a segment: a subtitle is read in that time."""
_ENDS = (".", "?", "!", "\u3002", "\uff1f", "\uff01")
"""Of a sentence, and of its segment."""


def as_segments(words: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Segments of `verbose_json`.

    Args:
        words: Of `verbose_json`: `word`, and its `start` and `end` in seconds.
    """
    segments: list[dict[str, Any]] = []
    ends_sentence = True
    for word in words:
        last = None if ends_sentence else segments[-1]
        if last is None or word["start"] - last["end"] > _PAUSE_S or word["end"] - last["start"] > _LONGEST_S:
            segments.append({"id": len(segments), "start": word["start"], "end": word["end"], "text": word["word"]})
        else:
            last["end"], last["text"] = word["end"], f"{last['text']} {word['word']}"
        ends_sentence = word["word"].endswith(_ENDS)
    return segments


def as_srt(segments: Sequence[dict[str, Any]]) -> str:
    """Segments of `verbose_json` as SubRip subtitles."""
    cues = [
        f"{number}\n{_time(segment['start'], ',')} --> {_time(segment['end'], ',')}\n{segment['text'].strip()}\n"
        for number, segment in enumerate(segments, start=1)
    ]
    return "\n".join(cues)


def as_vtt(segments: Sequence[dict[str, Any]]) -> str:
    """Segments of `verbose_json` as WebVTT subtitles."""
    cues = [
        f"{_time(segment['start'], '.')} --> {_time(segment['end'], '.')}\n{segment['text'].strip()}\n"
        for segment in segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


SUBTITLES: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {"srt": as_srt, "vtt": as_vtt}
"""By `response_format`."""


def _time(seconds: float, point: str) -> str:
    """`01:02:03,004`, with `point` before the milliseconds."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{milliseconds:03}"
