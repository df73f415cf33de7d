# SPDX-License-Identifier: Apache-2.0
"""The items of a conversation, and the chat messages that the model reads of them. Knows no sockets and no requests."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai.types.realtime.response_item_reference import ResponseItemReference

from vllm_omni.entrypoints.openai.audio_formats import wav_header
from vllm_omni.entrypoints.openai.realtime.audio import SoundFormat
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id

Message = dict[str, Any]
ROOT = "root"

_CONTENT = {
    "system": {"input_text": "text"},
    "user": {"input_text": "text", "input_audio": "audio", "input_image": "image_url"},
    "assistant": {"output_text": "text", "output_audio": "transcript"},
}
"""Types of content by role, each with the field that it needs."""


@dataclass(frozen=True)
class Sound:
    """What a user said.

    Attributes:
        samples: int16 `[n]`.
    """

    samples: np.ndarray
    format: SoundFormat

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.format.sample_rate

    def uri(self) -> str:
        """A WAV file."""
        pcm = self.samples.astype("<i2").tobytes()
        return "data:audio/wav;base64," + _base64(wav_header(self.format.sample_rate, 1, len(pcm)) + pcm)


@dataclass
class Item:
    """One item.

    Attributes:
        data: In the form of OpenAI's events, without sound.
        sounds: Those of a user's message, by index of its content.
        asr_settings: What the session set of the ASR stage's parameters when it was added; None: it was not added.
        has_no_words: Its sounds are silence, in which an ASR stage finds no text.
        made_ms, num_chars: Of an assistant's speech: its length, estimated while it is made, and that of its text.
        sent_ms: What of it the client has got.
    """

    data: dict[str, Any]
    sounds: dict[int, Sound] = field(default_factory=dict)
    asr_settings: dict[str, Any] | None = None
    has_no_words: bool = False
    made_ms: float = 0.0
    num_chars: int = 0
    sent_ms: float = 0.0

    @property
    def id(self) -> str:
        return self.data["id"]

    @property
    def content(self) -> list[dict[str, Any]]:
        return self.data.get("content", [])

    @property
    def seconds(self) -> float:
        """The length of its sounds."""
        return sum(sound.seconds for sound in self.sounds.values())

    @property
    def num_chars_kept(self) -> int:
        """The characters of its texts and images."""
        parts = [self.data, *self.content]
        return sum(len(value) for part in parts for value in part.values() if isinstance(value, str))

    def with_sound(self) -> dict[str, Any]:
        """The data with the user's sounds, as they were sent."""
        content = [dict(part) for part in self.content]
        for index, sound in self.sounds.items():
            content[index]["audio"] = _base64(sound.format.encode(sound.samples))
        return {**self.data, "content": content} if content else self.data

    def truncate(self, content_index: int, audio_end_ms: int) -> None:
        """Removes the part of an assistant's speech, and of its text, that was not played.

        The text has no times: it is cut at the word where so much of the speech ends, if all of it is spoken evenly.

        Raises:
            EventError: The item is not speech, or shorter.
        """
        part = self.content[content_index] if 0 <= content_index < len(self.content) else {}
        if part.get("type") != "output_audio":
            raise EventError("only speech of the assistant can be truncated", "content_index")
        if not 0 <= audio_end_ms <= np.ceil(self.sent_ms):
            raise EventError(
                f"audio_end_ms is {audio_end_ms}, and {self.sent_ms:.0f} ms of speech were sent", "audio_end_ms"
            )
        num_chars = round(self.num_chars * audio_end_ms / self.made_ms) if self.made_ms else 0
        text = part["transcript"]
        if num_chars < len(text):
            heard = text[:num_chars]
            part["transcript"] = heard if text[num_chars].isspace() else heard.rpartition(" ")[0]
        self.sent_ms = float(audio_end_ms)
        self.made_ms, self.num_chars = self.sent_ms, len(part["transcript"])


def read_item(item: Any, sound_format: SoundFormat, at: str) -> Item:
    """An item that a client creates.

    Args:
        item: One of OpenAI's types for messages, function calls or their outputs.
        sound_format: Of its sounds.
        at: Its place in the event.

    Raises:
        EventError: Its content is wrong.
    """
    data = {**item.model_dump(exclude_none=True), "object": "realtime.item", "status": "completed"}
    data["id"] = data.get("id") or new_id("item")
    if data["type"] == "function_call":
        data["call_id"] = data.get("call_id") or new_id("call")
    made = Item(data)
    if data["type"] != "message":
        return made
    known = _CONTENT[data["role"]]
    for i, part in enumerate(data["content"]):
        name = f"{at}.content[{i}]"
        kind = part.setdefault("type", next(iter(known)))
        if kind not in known:
            raise EventError(f"a message of the {data['role']} has {', '.join(known)}", f"{name}.type")
        if known[kind] not in part:
            raise EventError(f"{kind} needs {known[kind]}", f"{name}.{known[kind]}", "missing_required_parameter")
        if kind == "input_audio":
            samples = decode_sound(part.pop("audio"), sound_format, f"{name}.audio")
            made.sounds[i] = Sound(samples, sound_format)
    return made


def decode_sound(audio: str, sound_format: SoundFormat, param: str) -> np.ndarray:
    """int16 `[n]` of base64.

    Raises:
        EventError: It is not base64, or has half a sample.
    """
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EventError(f"{param} is not base64: {error}", param) from error
    if len(data) % sound_format.num_bytes:
        raise EventError(f"{param} has {len(data)} bytes; a sample has {sound_format.num_bytes}", param)
    return sound_format.decode(data)


class Conversation:
    """Items in order, by id."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    @property
    def seconds(self) -> float:
        """The length of all sounds."""
        return sum(item.seconds for item in self._items)

    @property
    def num_chars(self) -> int:
        """The characters of all texts and images."""
        return sum(item.num_chars_kept for item in self._items)

    def add(self, item: Item, previous_id: str | None = None) -> str | None:
        """Adds it after another item, or at the end; returns the id of the one before it.

        Raises:
            EventError: There is no item before it, or it has the id of another.
        """
        if any(item.id == other.id for other in self._items):
            raise EventError(f"there is an item {item.id!r} already", "item.id", "item_create_duplicate_item_id")
        index = len(self._items)
        if previous_id == ROOT:
            index = 0
        elif previous_id is not None:
            index = self._index(previous_id, "previous_item_id") + 1
        self._items.insert(index, item)
        return self._items[index - 1].id if index else None

    def before(self, item: Item) -> str | None:
        """The id of the item before one; None if it is the first, or was deleted."""
        index = next((i for i, other in enumerate(self._items) if other is item), 0)
        return self._items[index - 1].id if index else None

    def get(self, item_id: str, param: str = "item_id", code: str = "item_not_found") -> Item:
        """
        Raises:
            EventError: There is none; with this code.
        """
        return self._items[self._index(item_id, param, code)]

    def delete(self, item_id: str) -> None:
        """Raises as `get`."""
        del self._items[self._index(item_id, "item_id")]

    def select(self, items: Sequence[Any], sound_format: SoundFormat) -> list[Item]:
        """The input of one response: items of its own, and references to those of the conversation.

        Raises:
            EventError: There is no such item, or one is wrong.
        """
        names = [f"response.input[{i}]" for i in range(len(items))]
        return [
            self.get(item.id, f"{name}.id")
            if isinstance(item, ResponseItemReference)
            else read_item(item, sound_format, name)
            for item, name in zip(items, names, strict=True)
        ]

    def _index(self, item_id: str, param: str, code: str = "item_not_found") -> int:
        for i, item in enumerate(self._items):
            if item.id == item_id:
                return i
        raise EventError(f"there is no item {item_id!r}", param, code)


def to_messages(instructions: str, items: Iterable[Item]) -> list[Message]:
    """The messages of a chat request. Function calls belong to the assistant's message before them."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        data = item.data
        if data["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": data["call_id"], "content": data["output"]})
        elif data["type"] == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_tool_call(data))
        elif data["role"] == "assistant":
            text = "".join(part.get("text") or part.get("transcript") or "" for part in item.content)
            messages.append({"role": "assistant", "content": text})
        else:
            parts = [_part(item, i, part) for i, part in enumerate(item.content)]
            messages.append({"role": data["role"], "content": parts})
    return messages


def to_asr_settings(items: Iterable[Item], current: dict[str, Any]) -> list[dict[str, Any]]:
    """What each sound of `to_messages` is transcribed with, in their order; `current`: if its item has no settings."""
    heard = [item for item in items if not item.has_no_words]
    return [current if item.asr_settings is None else item.asr_settings for item in heard for _ in item.sounds]


def _tool_call(data: dict[str, Any]) -> dict[str, Any]:
    function = {"name": data["name"], "arguments": data["arguments"]}
    return {"id": data["call_id"], "type": "function", "function": function}


def _part(item: Item, index: int, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_audio" and item.has_no_words:
        return {"type": "text", "text": ""}
    if part["type"] == "input_audio":
        return {"type": "audio_url", "audio_url": {"url": item.sounds[index].uri()}}
    if part["type"] == "input_image":
        image = {"url": part["image_url"], **({"detail": part["detail"]} if "detail" in part else {})}
        return {"type": "image_url", "image_url": image}
    return {"type": "text", "text": part["text"]}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
