# SPDX-License-Identifier: Apache-2.0
"""Sessions of /v1/audio/speech/stream, and what they got."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import websockets
from fastapi import FastAPI

from tests.entrypoints.openai.fake_server import over_http
from vllm_omni.entrypoints.openai import speech_stream


class Stream:
    """A connection, and all its events so far."""

    def __init__(self, socket: websockets.ClientConnection, url: str) -> None:
        self.socket, self.url = socket, url
        self.events: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def append(self, *pieces: str) -> None:
        for piece in pieces:
            await self.send("input_text_buffer.append", text=piece)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            self.events.append(json.loads(await self.socket.recv()))
        return self.events[-1]

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to one of a type, which is the last."""
        events = [await self.next()]
        while events[-1]["type"] != kind:
            assert events[-1]["type"] != "error", events[-1]
            events.append(await self.next())
        return events

    async def configure(self, **session: Any) -> dict[str, Any]:
        await self.send("session.update", session=session)
        return (await self.until("session.updated"))[-1]["session"]

    async def say(self, *pieces: str) -> list[dict[str, Any]]:
        await self.append(*pieces)
        await self.send("input_text_buffer.commit")
        return await self.until("speech.audio.done")

    async def speak(self, text: str, **fields: Any) -> bytes:
        """The sound of a text by itself."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            body = {"input": text, "response_format": "pcm", **fields}
            answer = await client.post("/v1/audio/speech", json=body)
        assert answer.status_code == 200, answer.text
        return answer.content

    async def error(self) -> dict[str, Any]:
        event = await self.next()
        assert event["type"] == "error", event
        return event["error"]


@asynccontextmanager
async def opened(url: str, query: str = "", **connect: Any) -> AsyncIterator[Stream]:
    async with websockets.connect(url.replace("http", "ws") + speech_stream.PATH + query, **connect) as socket:
        stream = Stream(socket, url)
        assert (await stream.next())["type"] == "session.created"
        yield stream


def stream(app: FastAPI, main: Callable[[Stream], Awaitable[None]], **options: Any) -> None:
    async def run(url: str) -> None:
        async with opened(url) as opened_stream:
            await main(opened_stream)

    with over_http(app, **options) as url:
        asyncio.run(run(url))


def sound_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta")
