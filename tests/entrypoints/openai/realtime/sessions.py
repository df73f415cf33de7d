# SPDX-License-Identifier: Apache-2.0
"""Sessions of OpenAI's own client, and what they got: every event is checked against the package's types."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import openai
import pytest
from fastapi import FastAPI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import MODEL

Result = TypeVar("Result")
SERVER_EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)

MANUAL: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
"""A session whose client commits its sound."""


class Session:
    """A connection, and all its events so far."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection
        self.events: list[Any] = []

    async def next(self) -> Any:
        event = await self.connection.recv()
        data = event.model_dump(exclude_unset=True)
        checked = SERVER_EVENTS.validate_python(data)
        assert checked.type == event.type
        self.events.append(event)
        return event

    async def until(self, event_type: str) -> list[Any]:
        """The events up to one of a type, which is the last."""
        events = [await self.next()]
        while events[-1].type != event_type:
            assert events[-1].type != "error", events[-1]
            events.append(await self.next())
        return events

    async def configure(self, **session: Any) -> Any:
        await self.connection.session.update(session={"type": "realtime", **session})
        return (await self.until("session.updated"))[-1].session

    async def create(self, *content: Any) -> None:
        """Sends a message of the user."""
        item: Any = {"type": "message", "role": "user", "content": list(content)}
        await self.connection.conversation.item.create(item=item)

    async def add(self, *content: Any) -> Any:
        """A message of the user; its item."""
        await self.create(*content)
        return (await self.until("conversation.item.done"))[-1].item

    async def say(self, text: str) -> Any:
        """The same of a text."""
        return await self.add({"type": "input_text", "text": text})

    async def retrieve(self, item_id: str) -> Any:
        await self.connection.conversation.item.retrieve(item_id=item_id)
        return (await self.until("conversation.item.retrieved"))[-1].item

    async def delete(self, item_id: str) -> None:
        await self.connection.conversation.item.delete(item_id=item_id)
        await self.until("conversation.item.deleted")

    async def truncate(self, item_id: str, audio_end_ms: int) -> None:
        item = self.connection.conversation.item
        await item.truncate(item_id=item_id, content_index=0, audio_end_ms=audio_end_ms)
        await self.until("conversation.item.truncated")

    async def speak(self, samples: np.ndarray) -> Any:
        """A turn of sound, int16 `[n]`; its item."""
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(samples.tobytes()).decode())
        await self.connection.input_audio_buffer.commit()
        return (await self.until("conversation.item.done"))[-1].item

    async def respond(self, **response: Any) -> list[Any]:
        await self.connection.response.create(response=response)
        return await self.until("response.done")

    async def error(self) -> Any:
        """The next event, which is an error."""
        event = await self.next()
        assert event.type == "error", event
        return event.error


@asynccontextmanager
async def opened(
    url: str, *, key: str = "none", model: str = MODEL, manual: bool = True, **connect: Any
) -> AsyncIterator[Session]:
    """A session; its first event was read. `manual`: without turn detection."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    async with client, client.realtime.connect(model=model, **connect) as connection:
        session = Session(connection)
        assert (await session.next()).type == "session.created"
        if manual:
            await connection.session.update(session=MANUAL)
            await session.until("session.updated")
        yield session


async def refusal(url: str, **options: Any) -> tuple[int, bytes]:
    """The status and the body of the answer to a client that gets no session."""
    with pytest.raises(InvalidStatus) as caught:
        async with opened(url, **options):
            pass
    answer = caught.value.response
    return answer.status_code, answer.body or b""


def visit(app: FastAPI, main: Callable[[str], Awaitable[Result]], **options: Any) -> Result:
    """Runs `main` with the address of a server of the application. `options` are uvicorn's."""
    with over_http(app, **options) as url:
        return asyncio.run(main(url))  # type: ignore[arg-type]


def converse(app: FastAPI, main: Callable[[Session], Awaitable[Result]], **options: Any) -> Result:
    """Runs `main` with a session of the application."""

    async def run(url: str) -> Result:
        async with opened(url, **options) as session:
            return await main(session)

    return visit(app, run)


def types_of(events: list[Any]) -> list[str]:
    """The types of events, repeated ones once."""
    types = [event.type for event in events]
    return [name for i, name in enumerate(types) if i == 0 or types[i - 1] != name]


def speech_of(events: list[Any]) -> bytes:
    return b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta")
