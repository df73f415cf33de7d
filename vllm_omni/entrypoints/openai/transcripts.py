# SPDX-License-Identifier: Apache-2.0
"""Texts of earlier spoken answers, for later turns that name them by `audio.id`, as OpenAI's API allows."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

LIFETIME_S = 3600
MAX_TRANSCRIPTS = 10_000


class Transcripts:
    """The transcripts of the last hour, at most `MAX_TRANSCRIPTS`. Ids are random, so that nobody can guess another's.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[float, str]] = OrderedDict()  # id: (expiry, text), in order of expiry

    def keep(self, audio_id: str, transcript: str) -> int:
        """Keeps a transcript; returns when it expires, in seconds since 1970."""
        now = time.time()
        self._kept[audio_id] = (now + LIFETIME_S, transcript)
        while len(self._kept) > MAX_TRANSCRIPTS or next(iter(self._kept.values()))[0] <= now:
            self._kept.popitem(last=False)
        return int(now + LIFETIME_S)

    def fill_in(self, messages: Sequence[Any]) -> list[Any]:
        """The messages, with the text of those that name only an `audio.id`.

        Raises:
            VLLMValidationError: There is no such audio, or it has expired.
        """
        return [self._with_text(message, i) for i, message in enumerate(messages)]

    def _with_text(self, message: Any, index: int) -> Any:
        audio = message.get("audio") if isinstance(message, dict) else None
        if audio is None or message.get("content"):
            return message
        audio_id = audio.get("id") if isinstance(audio, dict) else None
        expiry, transcript = self._kept.get(audio_id, (0.0, "")) if isinstance(audio_id, str) else (0.0, "")
        if expiry <= time.time():
            raise VLLMValidationError(
                f"there is no audio {audio_id!r}, or it has expired; send its transcript as content",
                parameter=f"messages[{index}].audio.id",
            )
        return {**{key: value for key, value in message.items() if key != "audio"}, "content": transcript}


def new_audio_id() -> str:
    return f"audio-{random_uuid()}"
