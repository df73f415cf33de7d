# SPDX-License-Identifier: Apache-2.0
"""The items of a conversation, and the chat messages that the model reads of them. Knows no sockets and no requests."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

import numpy as np
import regex
from openai.types.realtime.response_item_reference import ResponseItemReference
from vllm import envs
from vllm.utils import random_uuid

from vllm_omni.entrypoints.openai import media_input
from vllm_omni.entrypoints.openai.media_input import MIN_AUDIO_SECONDS
from vllm_omni.entrypoints.openai.realtime.audio import Sound, SoundFormat
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionShare, Share

Message = dict[str, Any]
ROOT = "root"

_CONTENT = {
    "system": {"input_text": "text"},
    "user": {"input_text": "text", "input_audio": "audio", "input_image": "image_url"},
    "assistant": {"output_text": "text", "output_audio": "transcript"},
}
"""Types of content by role, each with the field that it needs."""

_MS_PER_LETTER = 1000 / 15
"""Of speech that is not complete yet: about 150 words of English in a minute."""

_ITEM_BYTES = 2000
"""About what an item takes without its texts, sounds and images."""

_UNSPACED = r"\p{lb=SA}\p{lb=ID}\p{lb=CJ}\p{lb=NS}"
"""The classes of line breaking (UAX 14) of scripts without spaces, as Chinese, Japanese and Thai; of emoji, too."""
_UNIT = regex.compile(rf"\s+|(?=[{_UNSPACED}])\X|[^\s{_UNSPACED}]+")
"""Spaces, a character of such a script with its marks, or a word of another."""


@dataclass(frozen=True)
class Picture:
    """An image. It is not kept as the response that reads it first decodes it: so it would take of the budget of all
    requests for as long as its session.

    Attributes:
        source: Its file, fetched when its item was added, or the data URI that the item has.
        address: Names it in messages, where only its session can use it.
    """

    source: bytes | str
    address: str = field(default_factory=lambda: f"image:{random_uuid()}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the file; a data URI is one of its item's texts."""
        return len(self.source) if isinstance(self.source, bytes) else 0

    @property
    def url(self) -> str:
        """The image's address in messages; where another connector of vLLM's reads these, the image itself."""
        if envs.VLLM_MEDIA_CONNECTOR == media_input.CONNECTOR_NAME:
            return self.address
        return self.source if isinstance(self.source, str) else "data:image;base64," + _base64(self.source)


@dataclass
class Speech:
    """How much an assistant says: some of it may not be made yet, or not sent.

    Attributes:
        speed: See `OutputSound`.
        made_ms, text_length: What was made of it, and the `spoken_length` of its text so far.
        is_made: Whether that is all.
        sent_ms: What of it the client has got.
    """

    speed: float = 1.0
    made_ms: float = 0.0
    text_length: int = 0
    is_made: bool = False
    sent_ms: float = 0.0

    @property
    def length_ms(self) -> float:
        """Milliseconds of all of it. What is still being made lags behind its text, and will be longer."""
        return max(self.made_ms, 0.0 if self.is_made else self.text_length * _MS_PER_LETTER / self.speed)


@dataclass
class Item:
    """One item.

    Attributes:
        data: In the form of OpenAI's events, without sound.
        sounds: Those of a user's message, by index of its content.
        asr_settings: What the session set of the ASR stage's parameters when it was added.
        pictures: Its images, once they were read, by index of its content.
        speech: Of an assistant's message.
        is_read: Whether responses read it; not, once it has left a prompt that was too long.
        share: Of the budget, for its texts; None: it is not counted.
    """

    data: dict[str, Any]
    sounds: dict[int, Sound] = field(default_factory=dict)
    asr_settings: dict[str, Any] = field(default_factory=dict)
    pictures: dict[int, Picture] = field(default_factory=dict)
    speech: Speech = field(default_factory=Speech)
    is_read: bool = True
    share: SessionShare | None = None

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
    def images(self) -> dict[int, str]:
        """The addresses of its images, by index of its content."""
        return {i: part["image_url"] for i, part in enumerate(self.content) if part.get("type") == "input_image"}

    @property
    def num_chars_kept(self) -> int:
        """The characters of its texts and images, and the bytes of those that were fetched."""
        parts = [self.data, *self.content]
        num_bytes = sum(picture.num_bytes for picture in self.pictures.values())
        return num_bytes + sum(len(value) for part in parts for value in part.values() if isinstance(value, str))

    def count(self, share: Share) -> None:
        """Counts it, each of its parts for as long as that lives: a response may read what was deleted.

        Raises:
            PipelineFullError: There is no room for it.
        """
        self.share = share(self)
        self.count_texts()
        for sound in self.sounds.values():
            share(sound).set(sound.samples.nbytes)

    def lengthen_sound(self, sound: Sound, share: Share) -> None:
        """Has its sound be all of one whose first `num_spoken` samples it has. What a model reads of it is as before.

        Raises:
            PipelineFullError: There is no room for it.
        """
        own = self.sounds[0]
        share(own).set(sound.samples.nbytes - own.samples.nbytes)
        own.num_spoken = sound.num_spoken  # First: another thread may read it.
        own.samples = sound.samples

    def count_pictures(self, share: Share) -> None:
        """Counts its pictures, once they were read, as `count`."""
        for picture in self.pictures.values():
            share(picture).set(picture.num_bytes)

    def count_texts(self) -> None:
        """Counts its texts as they are now, if it is counted.

        Raises:
            PipelineFullError: There is no room for them.
        """
        if self.share is not None:
            values = [value for part in [self.data, *self.content] for value in part.values()]
            self.share.set(_ITEM_BYTES + sum(getsizeof(value) for value in values if isinstance(value, str)))

    def with_sound(self) -> dict[str, Any]:
        """The data with the user's sounds, as they were sent."""
        content = [dict(part) for part in self.content]
        for index, sound in self.sounds.items():
            content[index]["audio"] = _base64(sound.format.encode(sound.samples))
        return {**self.data, "content": content} if content else self.data

    def drop_sounds(self) -> bool:
        """Keeps the texts of its sounds in their place; False, and nothing, if one is not known."""
        texts = {
            i: self.content[i].get("transcript") if sound.text is None else sound.text
            for i, sound in self.sounds.items()
        }
        if None in texts.values():
            return False
        nothing = np.zeros(0, np.int16)
        self.sounds = {i: Sound(nothing, sound.format, texts[i]) for i, sound in self.sounds.items()}
        return True

    def truncate(self, content_index: int, audio_end_ms: int) -> None:
        """Removes the part of an assistant's speech, and of its text, that was not played.

        The text has no times: it is cut where so much of the speech ends, if all of it is spoken evenly, at the end of
        a word, or of a character where the script has no spaces.

        Raises:
            EventError: The item is not speech, or shorter.
        """
        part, speech = self.content[content_index] if 0 <= content_index < len(self.content) else {}, self.speech
        if part.get("type") != "output_audio":
            raise EventError("only speech of the assistant can be truncated", "content_index")
        if not 0 <= audio_end_ms <= np.ceil(speech.sent_ms):
            raise EventError(
                f"audio_end_ms is {audio_end_ms}, and {speech.sent_ms:.0f} ms of speech were sent", "audio_end_ms"
            )
        length = round(speech.text_length * audio_end_ms / speech.length_ms) if speech.length_ms else 0
        if length < spoken_length(part["transcript"]):
            part["transcript"] = _cut(part["transcript"], length)
        speech.made_ms = speech.sent_ms = float(audio_end_ms)
        speech.text_length, speech.is_made = spoken_length(part["transcript"]), True


def read_item(item: Any, sound_format: SoundFormat, asr_settings: dict[str, Any], at: str) -> Item:
    """An item that a client creates.

    Args:
        item: One of OpenAI's types for messages, function calls or their outputs.
        sound_format: Of its sounds.
        asr_settings: See `Item`.
        at: Its place in the event.

    Raises:
        EventError: Its content is wrong.
    """
    data = {**item.model_dump(exclude_none=True), "object": "realtime.item", "status": "completed"}
    data["id"] = data.get("id") or new_id("item")
    if data["type"] == "function_call":
        data["call_id"] = data.get("call_id") or new_id("call")
    made = Item(data, asr_settings=asr_settings)
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
            made.sounds[i] = _decode_sound(part.pop("audio"), sound_format, f"{name}.audio")
    return made


def decode_base64(audio: str, param: str) -> bytes:
    """
    Raises:
        EventError: It is not base64.
    """
    try:
        return media_input.decode_base64(audio)
    except ValueError as error:
        raise EventError(f"{param} is not base64: {error}", param) from error


def _decode_sound(audio: str, sound_format: SoundFormat, param: str) -> Sound:
    data = decode_base64(audio, param)
    if len(data) % sound_format.num_bytes:
        raise EventError(f"{param} has {len(data)} bytes; a sample has {sound_format.num_bytes}", param)
    sound = Sound(sound_format.decode(data), sound_format)
    if sound.seconds < MIN_AUDIO_SECONDS:
        raise EventError(
            f"{param} has {1000 * sound.seconds:.0f} ms of sound; send at least {1000 * MIN_AUDIO_SECONDS:.0f} ms",
            param,
        )
    return sound


class Conversation:
    """Items in order, by id.

    Attributes:
        id: Its own id.
    """

    def __init__(self) -> None:
        self.id = new_id("conv")
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def clear(self) -> None:
        """Removes all items."""
        self._items.clear()

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def read_items(self) -> list[Item]:
        """What responses read: neither items that have left the prompt nor the results of such calls."""
        left = [item for item in self._items if not item.is_read]
        return without_outputs_of(left, [item for item in self._items if item.is_read])

    def turn(self, item: Item) -> list[Item]:
        """An item and those after it that belong to its turn."""
        start = self._index(item.id, "item_id")
        end = next((i for i in range(start + 1, len(self)) if is_turn_start(self._items[i])), len(self))
        return self._items[start:end]

    @property
    def oldest(self) -> Item | None:
        return self._items[0] if self._items else None

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

    def keep_newest_sounds(self, limit_s: float, newest: Item, *, whole_turns: bool) -> list[Item]:
        """Drops the oldest sounds until `limit_s` seconds are left, and returns those items that were removed whole,
        since their texts are not known. Not `newest`, wherever it was added.

        Args:
            whole_turns: Whether responses do not read what follows in the turn of a removed item either.
        """
        removed = []
        for item in [item for item in self._items if item.seconds and item is not newest]:
            if self.seconds <= limit_s:
                break
            if not item.drop_sounds():
                for other in self.turn(item) if whole_turns else ():
                    other.is_read = False
                self.delete(item.id)
                removed.append(item)
        return removed

    def select(self, items: Sequence[Any], sound_format: SoundFormat, asr_settings: dict[str, Any]) -> list[Item]:
        """The input of one response: items of its own, see `read_item`, and references to those of the conversation.

        Raises:
            EventError: There is no such item, or one is wrong.
        """
        names = [f"response.input[{i}]" for i in range(len(items))]
        return [
            self.get(item.id, f"{name}.id")
            if isinstance(item, ResponseItemReference)
            else read_item(item, sound_format, asr_settings, name)
            for item, name in zip(items, names, strict=True)
        ]

    def _index(self, item_id: str, param: str, code: str = "item_not_found") -> int:
        for i, item in enumerate(self._items):
            if item.id == item_id:
                return i
        raise EventError(f"there is no item {item_id!r}", param, code)


def is_turn_start(item: Item) -> bool:
    """Whether a turn starts with it: each message of the user or the system, which answers and calls follow."""
    return item.data["type"] == "message" and item.data["role"] != "assistant"


def is_call_output(item: Item) -> bool:
    """Whether it is the result of a function call."""
    return item.data["type"] == "function_call_output"


def without_outputs_of(left: Iterable[Item], items: Iterable[Item]) -> list[Item]:
    """Items without the results of function calls that are among others: no result is read without its call."""
    calls = {item.data["call_id"] for item in left if item.data["type"] == "function_call"}
    return [item for item in items if not (is_call_output(item) and item.data["call_id"] in calls)]


def to_messages(instructions: str, items: Iterable[Item]) -> list[Message]:
    """The messages of a chat request, with the addresses of sounds. Function calls belong to the assistant's message
    before them."""
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


def _tool_call(data: dict[str, Any]) -> dict[str, Any]:
    function = {"name": data["name"], "arguments": data["arguments"]}
    return {"id": data["call_id"], "type": "function", "function": function}


def _part(item: Item, index: int, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_audio":
        sound = item.sounds[index]
        if sound.text is not None:
            return {"type": "text", "text": sound.text}
        return {"type": "audio_url", "audio_url": {"url": sound.url}, "uuid": sound.address}
    if part["type"] == "input_image":
        detail = {"detail": part["detail"]} if "detail" in part else {}
        if (picture := item.pictures.get(index)) is None:
            return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        return {"type": "image_url", "image_url": {"url": picture.url, **detail}, "uuid": picture.address}
    return {"type": "text", "text": part["text"]}


def spoken_length(text: str) -> int:
    """How long it takes to speak a text, in letters of English: about three for a wide character, as of Chinese."""
    return sum(3 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _cut(text: str, length: int) -> str:
    """The words of a text that end within so much of its `spoken_length`."""
    end = 0
    for unit in _UNIT.finditer(text):
        length -= spoken_length(unit.group())
        if length < 0:
            break
        end = unit.end()
    return text[:end].rstrip()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
