# SPDX-License-Identifier: Apache-2.0
"""The items of a response's output: messages of text or speech, and function calls, with their events in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.realtime.audio import OutputSound
from vllm_omni.entrypoints.openai.realtime.config import PromptLimits, Values
from vllm_omni.entrypoints.openai.realtime.conversation import Conversation, Item
from vllm_omni.entrypoints.openai.realtime.protocol import new_id
from vllm_omni.entrypoints.openai.realtime.session_budget import Share
from vllm_omni.entrypoints.openai.request_context import RequestContext

_PIECE_S = 0.2  # Speech in an event, so that the lead is kept and a cancellation is quick.


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """What all responses of a session use.

    Attributes:
        send: Sends an event: its type and fields.
        start: Runs work in a task, until the session ends.
        chat: The handler of the requests.
        client: The context of the WebSocket, whose client sends all requests.
        prompt_limits: Of the model.
        sample_rate: Of the model's speech, in Hz.
        lead_s: How far the speech that was sent may be ahead of its playing, in seconds.
        share: Counts what it holds.
    """

    send: Callable[..., Awaitable[None]]
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    chat: OmniServingChat
    client: RequestContext
    prompt_limits: PromptLimits
    sample_rate: int
    lead_s: float
    share: Share


@dataclass(frozen=True)
class ResponseWriter:
    """Where the items of one response go: to the client, and into the conversation unless it is out of band.

    Attributes:
        response_id: Of the response.
        conversation: None: the response is out of band.
        output: Its `audio.output`.
    """

    session: SessionContext
    response_id: str
    conversation: Conversation | None
    output: Values

    async def send(self, event_type: str, **fields: Any) -> None:
        """Sends an event of the response."""
        await self.session.send(event_type, response_id=self.response_id, **fields)

    async def add_item(self, item: Item) -> None:
        """Adds an item to the conversation."""
        if self.conversation is not None:
            previous = self.conversation.add(item)
            await self.session.send("conversation.item.added", previous_item_id=previous, item=item.data)

    async def finish_item(self, item: Item) -> None:
        """Reports that an item of the conversation is complete."""
        if self.conversation is not None:
            previous = self.conversation.before(item)
            await self.session.send("conversation.item.done", previous_item_id=previous, item=item.data)


class Output:
    """One item of a response's output.

    A cancellation may come at any event, so the events of its start are steps: what is missing is sent at its end.

    Attributes:
        item: The item, as far as it has been sent.
    """

    def __init__(self, writer: ResponseWriter, index: int, data: dict[str, Any]) -> None:
        item = {"id": new_id("item"), "object": "realtime.item", "status": "in_progress", **data}
        self.item = Item(item)
        self._writer, self._index = writer, index
        self._opening: list[Callable[[], Awaitable[None]]] = [self._send_added, lambda: writer.add_item(self.item)]

    async def open(self) -> None:
        """Sends the events of its start.

        Raises:
            PipelineFullError: There is no room for it.
        """
        if self.item.share is None:
            self.item.count(self._writer.session.share)
        while self._opening:
            await self._opening.pop(0)()

    async def _send_added(self) -> None:
        await self._writer.send("response.output_item.added", output_index=self._index, item=self.item.data)

    async def finish(self, status: str) -> None:
        """Sends the events of its end."""
        await self.open()
        await self._finish_content()
        self.item.data["status"] = status
        await self._writer.finish_item(self.item)
        await self._writer.send("response.output_item.done", output_index=self._index, item=self.item.data)

    async def _finish_content(self) -> None:
        raise NotImplementedError

    async def _send(self, event_type: str, **fields: Any) -> None:
        await self._writer.send(event_type, item_id=self.item.id, output_index=self._index, **fields)


class Call(Output):
    """A function call."""

    def __init__(self, writer: ResponseWriter, index: int, call_id: str, name: str) -> None:
        super().__init__(writer, index, {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""})

    async def write(self, arguments: str) -> None:
        self.item.data["arguments"] += arguments
        self.item.count_texts()
        call_id = self.item.data["call_id"]
        await self._send("response.function_call_arguments.delta", call_id=call_id, delta=arguments)

    async def _finish_content(self) -> None:
        own = {name: self.item.data[name] for name in ("call_id", "name", "arguments")}
        await self._send("response.function_call_arguments.done", **own)


class _Message(Output):
    """A message with one part."""

    part_type = ""  # In events of the part.
    content_type, field = "", ""  # In the item.
    played_at = 0.0
    """When a client that plays at once has played what was sent, as the time of the event loop."""

    def __init__(self, writer: ResponseWriter, index: int) -> None:
        super().__init__(writer, index, {"type": "message", "role": "assistant", "content": []})
        self._opening.append(self._add_part)

    @property
    def text(self) -> str:
        return self.item.content[0][self.field]

    async def _add_part(self) -> None:
        self.item.content.append({"type": self.content_type, self.field: ""})
        await self._send("response.content_part.added", content_index=0, part={"type": self.part_type, self.field: ""})

    async def _write(self, text: str, event_type: str) -> None:
        self.item.content[0][self.field] += text
        self.item.count_texts()
        await self._send(event_type, content_index=0, delta=text)

    async def _finish_part(self) -> None:
        part = {"type": self.part_type, self.field: self.text}
        await self._send("response.content_part.done", content_index=0, part=part)


class WrittenMessage(_Message):
    """A message of text."""

    part_type, content_type, field = "text", "output_text", "text"

    async def write(self, text: str) -> None:
        await self._write(text, "response.output_text.delta")

    async def _finish_content(self) -> None:
        await self._send("response.output_text.done", content_index=0, text=self.text)
        await self._finish_part()


class SpokenMessage(_Message):
    """A message of speech with its transcript."""

    part_type, content_type, field = "audio", "output_audio", "transcript"

    def __init__(self, writer: ResponseWriter, index: int) -> None:
        super().__init__(writer, index)
        output = writer.output
        self._sound = OutputSound(output["format"]["type"], writer.session.sample_rate, output["speed"])

    async def write(self, text: str) -> None:
        await self._write(text, "response.output_audio_transcript.delta")

    async def speak(self, samples: np.ndarray) -> None:
        """Sends samples of the model as soon as the client may have them."""
        await self._send_sound(await asyncio.to_thread(self._sound.encode, samples))

    async def end_speech(self) -> None:
        """Sends the rest."""
        await self._send_sound(self._sound.finish())

    async def _send_sound(self, data: bytes) -> None:
        step = int(_PIECE_S * self._sound.format.sample_rate) * self._sound.format.num_bytes
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            seconds = self._sound.seconds(piece)
            await self._wait(seconds)
            self.item.speech.sent_ms += 1000 * seconds
            await self._send("response.output_audio.delta", content_index=0, delta=piece)  # It becomes base64.

    async def _wait(self, seconds: float) -> None:
        """Waits until so much more speech is within the lead."""
        now = asyncio.get_running_loop().time()
        self.played_at = max(self.played_at, now) + seconds
        if (early := self.played_at - now - self._writer.session.lead_s) > 0:
            await asyncio.sleep(early)

    async def _finish_content(self) -> None:
        await self._send("response.output_audio.done", content_index=0)
        await self._send("response.output_audio_transcript.done", content_index=0, transcript=self.text)
        await self._finish_part()
