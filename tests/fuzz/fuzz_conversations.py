# SPDX-License-Identifier: Apache-2.0
"""Realtime conversations of many random steps. Whatever happens in one, it goes on: a good turn follows each error."""

import asyncio
import base64
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import websockets

from tests.fuzz.fuzz_requests import ANSWER_LIMIT_S
from tests.fuzz.fuzz_sessions import bad_message

RATE = 24_000
SILENCE = np.zeros(RATE // 2, "<i2")
COUGH = np.full(RATE // 10, 300, "<i2")
SPEECH = np.full(RATE // 2, 12_000, "<i2")
"""Of a detector that takes any sound for speech."""

_TEXTS = ("Why is the sea blue?", "你好、世界。今天天气很好", "こんにちは。元気ですか", "สวัสดีครับ", "", " \n", "🐋")
_PICTURES = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAGUlEQVR4nGNsYMAPmAjIjyoYVTCqYNgqAACXvgDAMsm0"
    "fAAAAABJRU5ErkJggg==",
    "data:image/png;base64,AAAA",
    "x",
    "file:///etc/hostname",
)
_VAD: dict[str, Any] = {"type": "server_vad", "silence_duration_ms": 200, "idle_timeout_ms": 1000}
_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
_MAX_ITEMS = 8  # So that the model's context has room for all.
_IS_TOO_LONG = re.compile("maximum|max_model_len|too long|longer than")
_BUSY = "conversation_already_has_active_response"


async def fuzz_conversation(
    port: int, rng: random.Random, num_steps: int, speech: np.ndarray = SPEECH, model: str | None = None
) -> list[str]:
    """Holds one conversation; returns what went wrong.

    Args:
        speech: int16 `[n]` at 24 kHz, which the server's detector hears.
    """
    address = f"ws://127.0.0.1:{port}/v1/realtime" + (f"?model={model}" if model else "")
    conversation: Conversation | None = None
    try:
        async with websockets.connect(address, max_size=None) as socket:
            conversation = Conversation(socket, rng, speech)
            for _ in range(num_steps):
                await asyncio.wait_for(conversation.step(), ANSWER_LIMIT_S)
            await asyncio.wait_for(conversation.good_turn(), ANSWER_LIMIT_S)
            return conversation.faults
    except (OSError, TimeoutError, websockets.WebSocketException) as error:
        steps = [] if conversation is None else conversation.steps
        return [f"a conversation ended with {error!r} after {steps}"]


class Conversation:
    """The client of one session.

    Attributes:
        steps: What it did, the last at the end.
        faults: What the server did wrong.
    """

    def __init__(self, socket: websockets.ClientConnection, rng: random.Random, speech: np.ndarray) -> None:
        self._socket, self._rng, self._speech = socket, rng, speech
        self.steps: list[str] = []
        self.faults: list[str] = []
        self._items: list[str] = []
        self._heard_ms: dict[str, float] = {}  # Of each spoken item.
        self._active: set[str] = set()
        self._num_errors = self._num_marks = self._num_turns = 0
        self._done: dict[str, dict[str, Any]] = {}  # Good turns, by number.
        self._is_busy = False
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "configure": self._configure,
            "speak": lambda: self._append(self._speech, SILENCE),
            "cough": lambda: self._append(COUGH, SILENCE),
            "stay silent": lambda: self._append(SILENCE, SILENCE, SILENCE),
            "interrupt": self._interrupt,
            "commit": lambda: self._send("input_audio_buffer.commit"),
            "write": self._write,
            "ask": lambda: self._send("response.create", response={"max_output_tokens": 8}),
            "ask beside": lambda: self._send("response.create", response={"conversation": "none"}),
            "cancel": lambda: self._send("response.cancel"),
            "truncate": self._truncate,
            "call a tool": self._call_tool,
            "show a picture": self._show,
            "delete": self._delete,
            "read late": self._read_late,
            "send what is wrong": lambda: self._socket.send(bad_message(self._rng)),
        }

    async def step(self) -> None:
        """One random step, and a good turn if there was an error."""
        name = self._rng.choice(list(self._kinds))
        self.steps.append(name)
        await self._kinds[name]()
        before = self._num_errors
        await self._catch_up()
        while len(self._items) > _MAX_ITEMS:
            await self._send("conversation.item.delete", item_id=self._items[0])
            await self._catch_up()
        if self._num_errors > before:
            await self.good_turn()

    async def good_turn(self) -> None:
        """What the user writes is answered, beside all that was said before."""
        await self._send(
            "session.update",
            session={
                "type": "realtime",
                "tools": [],
                "tool_choice": "auto",
                "audio": {"input": {"turn_detection": None}},
            },
        )
        self._num_turns += 1
        number = str(self._num_turns)
        content = [{"type": "input_text", "text": f"Hello {number}"}]
        await self._send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        response = {"output_modalities": ["text"], "max_output_tokens": 4, "metadata": {"turn": number}}
        await self._send("response.cancel")
        await self._send("response.create", response=response)
        while (done := self._done.pop(number, None)) is None:
            await self._take_next()
            if self._is_busy and not self._active:  # A turn that was heard before has been answered.
                self._is_busy = False
                await self._send("response.create", response=response)
        error = (done["status_details"] or {}).get("error") or {}
        if _IS_TOO_LONG.search(error.get("message") or ""):
            for item_id in list(self._items):
                await self._send("conversation.item.delete", item_id=item_id)
            await self._catch_up()
            await self.good_turn()
        elif done["status"] not in ("completed", "incomplete"):
            self.faults.append(f"a good turn is answered with {done} after {self.steps[-10:]}")

    # Steps.

    async def _configure(self) -> None:
        audio = {"turn_detection": self._rng.choice([None, _VAD, {**_VAD, "interrupt_response": False}])}
        audio["transcription"] = self._rng.choice([None, {"model": "any"}])
        audio["format"] = {"type": self._rng.choice(["audio/pcm", "audio/pcm", "audio/pcmu"])}
        tools = self._rng.choice([[], [_TOOL]])
        await self._send("session.update", session={"type": "realtime", "tools": tools, "audio": {"input": audio}})

    async def _append(self, *sounds: np.ndarray) -> None:
        data = np.concatenate(sounds).astype("<i2").tobytes()
        size = self._rng.choice([4800, 4801, 96_000])
        for start in range(0, len(data), size):
            audio = base64.b64encode(data[start : start + size]).decode()
            await self._send("input_audio_buffer.append", audio=audio)

    async def _interrupt(self) -> None:
        """Speaks as soon as an answer is heard, and keeps what was heard of it."""
        await self._write()
        await self._send("response.create")
        await self._catch_up()
        await self._append(self._speech, SILENCE)
        await self._catch_up()
        await self._truncate()

    async def _write(self) -> None:
        content = [{"type": "input_text", "text": self._rng.choice(_TEXTS)}]
        await self._send("conversation.item.create", item={"type": "message", "role": "user", "content": content})

    async def _truncate(self) -> None:
        if spoken := [item for item in self._items if item in self._heard_ms]:
            item = self._rng.choice(spoken)
            end = self._rng.randint(0, round(self._heard_ms[item]))
            await self._send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=end)

    async def _call_tool(self) -> None:
        call_id = f"call_{self._rng.randrange(1000)}"
        arguments = self._rng.choice(["{}", '{"a": 1}', "{", "[]", ""])
        call = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": call_id, "output": self._rng.choice(_TEXTS)}
        for item in (call, output):
            await self._send("conversation.item.create", item=item)

    async def _show(self) -> None:
        content = [{"type": "input_image", "image_url": self._rng.choice(_PICTURES)}]
        await self._send("conversation.item.create", item={"type": "message", "role": "user", "content": content})

    async def _delete(self) -> None:
        if self._items:
            await self._send("conversation.item.delete", item_id=self._rng.choice(self._items))

    async def _read_late(self) -> None:
        """Asks for more than the system takes before it is read."""
        for item_id in self._items * 4:
            await self._send("conversation.item.retrieve", item_id=item_id)

    # Events.

    async def _send(self, event_type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": event_type, **fields}))

    async def _catch_up(self) -> None:
        """Reads the events up to the answer to a wrong one, which the server handles after all that was sent."""
        self._num_marks += 1
        mark = f"mark {self._num_marks}"
        await self._send(mark, event_id=mark)
        while not await self._take_next(mark):
            pass

    async def _take_next(self, mark: str | None = None) -> bool:
        """Whether it is the answer to the mark."""
        event = json.loads(await self._socket.recv())
        kind, response = event["type"], event.get("response") or {}
        if kind == "error":
            if mark is not None and event["error"]["event_id"] == mark:
                return True
            self._is_busy |= event["error"]["code"] == _BUSY
            self._take_error(event["error"])
        elif kind == "conversation.item.input_audio_transcription.failed":
            self._take_error(event["error"])
        elif kind == "conversation.item.added":
            self._items.append(event["item"]["id"])
        elif kind == "conversation.item.deleted":
            self._items.remove(event["item_id"])
            self._heard_ms.pop(event["item_id"], None)
        elif kind == "response.output_audio.delta":
            heard = self._heard_ms.get(event["item_id"], 0.0)
            self._heard_ms[event["item_id"]] = heard + len(base64.b64decode(event["delta"])) / 2 / RATE * 1000
        elif kind == "conversation.item.truncated":
            self._heard_ms[event["item_id"]] = event["audio_end_ms"]
        elif kind == "response.created":
            self._active.add(response["id"])
        elif kind == "response.done":
            self._active.discard(response["id"])
            if number := (response["metadata"] or {}).get("turn"):
                self._done[number] = response
            if error := (response["status_details"] or {}).get("error"):
                self._take_error(error)
        return False

    def _take_error(self, error: dict[str, Any]) -> None:
        self._num_errors += 1
        if error["type"] != "invalid_request_error":
            self.faults.append(f"{error} after {self.steps[-10:]}")
