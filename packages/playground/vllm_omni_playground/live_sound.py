# SPDX-License-Identifier: Apache-2.0
"""Sound that a browser plays while it is made: a file that grows, and an address for it.

A browser's own player reads it, as it reads a radio station. No codec runs here: the bytes are those of the server.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import gradio as gr
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

FORMAT: Final = "mp3"
"""Every browser plays it while it arrives, and it needs no length."""

MEDIA_TYPES = {"mp3": "audio/mpeg", "wav": "audio/wav", "flac": "audio/flac", "opus": "audio/ogg", "aac": "audio/aac"}
"""By format."""

ENDS = "for (const type of ['ended', 'error']) element.addEventListener(type, () => trigger('stop'), true);"
"""For `js_on_load`: media inside that have ended, or cannot be played, cause the component's `stop` event."""

_MAX_KEPT = 64


class LiveSound:
    """A file that grows. For one event loop.

    Attributes:
        format: One of `MEDIA_TYPES`.
        address: Of the file, below the page's.
    """

    def __init__(self, format: str = FORMAT) -> None:
        self.format = format
        self.address = f"sound/{secrets.token_urlsafe(24)}"
        self._pieces: list[bytes] = []
        self._is_complete = False
        self._changed = asyncio.Event()

    @property
    def data(self) -> bytes:
        """All bytes so far."""
        return b"".join(self._pieces)

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._notify()

    def finish(self) -> None:
        self._is_complete = True
        self._notify()

    async def read(self) -> AsyncIterator[bytes]:
        """The bytes from the first, until it is complete."""
        num_read = 0
        while num_read < len(self._pieces) or not self._is_complete:
            changed = self._changed
            if num_read == len(self._pieces):
                await changed.wait()
                continue
            pieces = self._pieces[num_read:]
            num_read += len(pieces)
            yield b"".join(pieces)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LiveSounds:
    """The last sounds of all visitors. Their addresses cannot be guessed."""

    def __init__(self) -> None:
        self._sounds: OrderedDict[str, LiveSound] = OrderedDict()

    def start(self, format: str = FORMAT) -> LiveSound:
        """A new, empty sound."""
        sound = LiveSound(format)
        self._sounds[sound.address] = sound
        while len(self._sounds) > _MAX_KEPT:
            self._sounds.popitem(last=False)
        return sound

    def add_route(self, app: FastAPI, path: str) -> None:
        """Serves them below the page, whose path ends with a slash."""

        async def stream(name: str) -> StreamingResponse:
            if (sound := self._sounds.get(f"sound/{name}")) is None:
                raise HTTPException(404, "there is no such sound, or it is too old")
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(sound.read(), media_type=MEDIA_TYPES[sound.format], headers=headers)

        app.add_api_route(f"{path}sound/{{name}}", stream, methods=["GET"], include_in_schema=False)


def make_player(elem_id: str) -> gr.HTML:
    """A place for a sound while it arrives (`player`). Its `stop` event says that all was heard."""
    return gr.HTML(elem_id=elem_id, elem_classes="player", js_on_load=ENDS)


def player(sound: LiveSound | None) -> str:
    """HTML that plays a sound at once; of None nothing, which ends one that plays."""
    return "" if sound is None else f'<audio controls autoplay src="{sound.address}"></audio>'
