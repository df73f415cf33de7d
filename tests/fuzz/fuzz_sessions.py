# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions with wrong events: each is refused by an event, and the session goes on."""

import asyncio
import base64
import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import websockets

from tests.fuzz.fuzz_requests import ANSWER_LIMIT_S

NUM_EVENTS = 20

_SOUND = base64.b64encode(np.zeros(4800, "<i2").tobytes()).decode()
_TEXT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
_SETTINGS: dict[str, Any] = {
    "type": "realtime",
    "output_modalities": ["text"],
    "instructions": "Be kind.",
    "max_output_tokens": 4,
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
    "tool_choice": "none",
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": {"post_instructions": 100}},
    "audio": {
        "input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None, "transcription": None},
        "output": {"format": {"type": "audio/pcmu"}, "voice": "alloy", "speed": 1.2},
    },
}
_VAD = {"type": "server_vad", "threshold": 0.4, "prefix_padding_ms": 100, "idle_timeout_ms": 1000}
EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "session": _SETTINGS},
    {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": _VAD}}}},
    {"type": "input_audio_buffer.append", "audio": _SOUND},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {"type": "conversation.item.create", "item": _TEXT, "previous_item_id": "root"},
    {"type": "conversation.item.create", "item": {**_TEXT, "content": [{"type": "input_audio", "audio": _SOUND}]}},
    {"type": "conversation.item.create", "item": {"type": "function_call_output", "call_id": "a", "output": "b"}},
    {"type": "conversation.item.retrieve", "item_id": "a"},
    {"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 10},
    {"type": "conversation.item.delete", "item_id": "a"},
    {"type": "response.create", "response": {"output_modalities": ["text"], "input": [_TEXT], "conversation": "none"}},
    {"type": "response.create", "response": {"output_modalities": ["text"], "max_output_tokens": 4}},
    {"type": "response.cancel"},
]
_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 2**70, 1e308, "", "x", "x" * 5000, "\x00\ud800", "root", [], [1], [[]], {}, {"type": "a"},
    "data:,", "http://127.0.0.1:1/x", ["text", "audio"], {"id": "nobody"}, {"type": "semantic_vad", "eagerness": "low"},
]  # fmt: skip
_RAW: list[str | bytes] = ["", "{", "[]", "null", "[" * 5000, '{"type": NaN}', b"\xff\x00", b"{}"]


async def fuzz_session(port: int, rng: random.Random) -> list[str]:
    """Opens a session, sends events, and asks for its configuration; returns what went wrong."""
    sent: list[str | bytes] = []
    try:
        async with websockets.connect(f"ws://127.0.0.1:{port}/v1/realtime", max_size=None) as socket:
            for _ in range(NUM_EVENTS):
                sent.append(bad_message(rng))
                await socket.send(sent[-1])
            await socket.send('{"type": "session.update", "event_id": "last", "session": {"type": "realtime"}}')
            await socket.send('{"type": "last", "event_id": "last"}')
            return await asyncio.wait_for(_read_to_the_end(socket), ANSWER_LIMIT_S)
    except (OSError, TimeoutError, websockets.WebSocketException) as error:
        return [f"a session ended with {error!r}; sent: {[each[:300] for each in sent]}"]


async def _read_to_the_end(socket: websockets.ClientConnection) -> list[str]:
    faults: list[str] = []
    while True:
        event = json.loads(await socket.recv())
        error = event.get("error") or ((event.get("response") or {}).get("status_details") or {}).get("error")
        if error and error["type"] != "invalid_request_error":
            faults.append(f"{event}")
        if event["type"] == "error" and event["error"]["event_id"] == "last":
            return faults


def bad_message(rng: random.Random, events: Sequence[dict[str, Any]] = EVENTS) -> str | bytes:
    """An event that may be wrong anywhere, or no event."""
    if rng.random() < 0.1:
        return rng.choice(_RAW)
    event = copy.deepcopy(rng.choice(events))
    if rng.random() < 0.7:
        _spoil(rng, event)
    return json.dumps(event)


def _spoil(rng: random.Random, value: Any) -> None:
    """Replaces, removes or adds something, at a random depth."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and rng.random() < 0.7:
        _spoil(rng, value[key])
    elif rng.random() < 0.2:
        del value[key]
    elif isinstance(value, dict) and rng.random() < 0.2:
        value["colour"] = rng.choice(_VALUES)
    else:
        value[key] = rng.choice(_VALUES)
