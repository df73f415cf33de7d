# SPDX-License-Identifier: Apache-2.0
"""What JSON may cost: its values are counted before they are read, and wrong ones make few errors."""

import threading
from typing import Annotated, Any

import openai.types.realtime as realtime_types
import pytest
from fastapi import Body
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from tests.entrypoints.openai.small_apps import make_app, send
from tests.entrypoints.openai.test_limits import JSON, in_room
from vllm_omni.entrypoints.openai import json_body
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.images import ImageRequest
from vllm_omni.entrypoints.openai.json_body import (
    LARGE_VALUES,
    OBJECT_VALUES,
    InvalidJsonError,
    TooManyValuesError,
    count_values,
    decode,
    validator_of,
)
from vllm_omni.entrypoints.openai.middleware import bound_json_routes
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, read_event
from vllm_omni.entrypoints.openai.speech_request import SpeechBatchRequest

MANY = 5000


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"5", 1),
        (b"[1, 2, 3]", 4),
        (b'{"a": 1, "b": [1, 2]}', 1 + OBJECT_VALUES + 3),
        (b'{"text": "a, b, c [d] {e} \\", \\\\", "b": ",,,,"}', 1 + OBJECT_VALUES + 1),
        (b'["\\\\", "\\"", ","]', 4),
    ],
)
def test_values_are_counted(text: bytes, count: int) -> None:
    assert count_values(text, count) == count
    assert count_values(text, count - 1) == count
    assert decode(text, count).value is not None
    with pytest.raises(TooManyValuesError, match=f"more than {count - 1} values"):
        decode(text, count - 1)


@pytest.mark.parametrize("text", [b"[" * 10_000, b'"' * 10_000, b'"","",' * 10_000, b"{},[" * 10_000, b"\\" * 10_000])
def test_what_is_no_json_costs_no_more(text: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        decode(text, 100)


def test_a_body_with_too_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(max_request_values=100)
    body = b'{"text": "a", "extra": [%s]}'
    many, few, text = b",".join([b"0"] * 100), b",".join([b"0"] * 50), b'"%s"' % (b"{},[" * 1000)
    refused = send(app, "POST", "/v1/echo", content=body % many, headers=JSON)
    assert refused.status_code == 413
    assert "100 values" in refused.json()["error"]["message"]
    assert "--max-request-values" in refused.json()["error"]["message"]
    for extra in (few, text):
        assert send(app, "POST", "/v1/echo", content=body % extra, headers=JSON).json()["text"] == "a"
    monkeypatch.setattr(json_body.msgspec.json, "decode", lambda data: pytest.fail("it was read"))
    assert send(app, "POST", "/v1/echo", content=body % many, headers=JSON).status_code == 413


MESSAGES = [{"role": "user", "content": "x"}]
TEXTS = {f"k{i}": "x" for i in range(MANY)}
COSTLY = [
    (OmniChatCompletionRequest, {"messages": MESSAGES, "tools": [0] * MANY}),
    (OmniChatCompletionRequest, {"messages": MESSAGES, "tools": [{}] * MANY}),
    (OmniChatCompletionRequest, {"messages": MESSAGES, "sampling_params_list": [0] * MANY}),
    (OmniChatCompletionRequest, {"messages": MESSAGES, "logit_bias": TEXTS}),
    (SpeechBatchRequest, {"inputs": [0] * MANY}),
    (ImageRequest, {"prompt": "x", **TEXTS}),
    (realtime_types.RealtimeSessionCreateRequest, {"type": "realtime", "tools": [0] * MANY}),
    (
        realtime_types.RealtimeConversationItemUserMessage,
        {"type": "message", "role": "user", "content": [0] * MANY},
    ),
]


@pytest.mark.parametrize(("model", "fields"), COSTLY, ids=[f"{case[0].__name__}-{i}" for i, case in enumerate(COSTLY)])
def test_many_wrong_values_make_few_errors(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        validator_of(model).validate_python(fields)
    assert refused.value.error_count() <= 30


def test_only_the_errors_are_fewer() -> None:
    class Inner(BaseModel):
        numbers: list[int] = []

    class Outer(BaseModel):
        model_config = ConfigDict(extra="forbid")
        inner: dict[str, Inner] = {}
        default: Any = {"type": "list"}

    validator = validator_of(Outer)
    fields = {"inner": {"a": {"numbers": [1, "2"]}}, "default": 5}
    assert validator.validate_python(fields) == Outer.model_validate(fields)
    assert validator.validate_python({}).default == {"type": "list"}
    wrong = {"inner": {"a": {"numbers": ["x", "y"]}, "b": {"numbers": ["z"]}}, "other": 1}
    with pytest.raises(ValidationError) as refused:
        validator.validate_python(wrong)
    assert [found["loc"] for found in refused.value.errors()] == [("inner", "a", "numbers", 0), ("other",)]


def test_a_large_body_is_checked_in_a_thread() -> None:
    threads = []

    def note(value: Any) -> Any:
        threads.append(threading.current_thread())
        return value

    class Numbers(BaseModel):
        numbers: Annotated[list[int], BeforeValidator(note)]

    async def add(numbers: Annotated[Numbers, Body()]) -> int:
        threads.append(threading.current_thread())
        return sum(numbers.numbers)

    app = make_app()
    app.add_api_route("/v1/sum", add, methods=["POST"])
    bound_json_routes(app)
    for count, is_large in ((10, False), (LARGE_VALUES, True)):
        assert send(app, "POST", "/v1/sum", json={"numbers": [1] * count}).json() == count
        checked, handled = threads
        assert (checked is not handled) == is_large
        threads.clear()


def test_large_json_counts_with_what_its_values_take() -> None:
    room_for_one = LARGE_VALUES * json_body.VALUE_BYTES * 3 // 2

    async def main(room: Any) -> None:
        body = b"[%s]" % b",".join([b"0"] * LARGE_VALUES)
        held = await room.hold(body, **JSON)
        refused = await room.client.post("/v1/hold", content=body, headers=JSON)
        assert refused.status_code == 429 and "retry-after" in refused.headers
        small = await room.client.post("/v1/echo", content=b'{"text": "a"}', headers=JSON)
        assert small.status_code == 200
        room.let.set()
        assert (await held).status_code == 200
        assert (await room.client.post("/v1/hold", content=body, headers=JSON)).status_code == 200

    in_room(main, max_request_bytes=room_for_one, max_total_request_bytes=room_for_one)


@pytest.mark.parametrize(
    "event",
    [
        b'{"type": "session.update", "session": {"type": "realtime", "tools": [%s]}}',
        b'{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [%s]}}',
    ],
)
def test_an_event_with_too_many_values_is_not_read(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = b",".join([b"0"] * MANY)
    with pytest.raises(EventError, match=r"\[0\]"):
        read_event(event % zeros)
    monkeypatch.setattr(json_body.msgspec.json, "decode", lambda data: pytest.fail("it was read"))
    with pytest.raises(EventError, match="--max-realtime-message-values"):
        read_event(event % zeros, MANY)
