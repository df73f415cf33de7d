# SPDX-License-Identifier: Apache-2.0
"""Client events: what is read, and errors that name the event's field."""

import json
from typing import Any

import pytest

from vllm_omni.entrypoints.openai.realtime.protocol import EventError, read_event


def read(**event: Any) -> Any:
    return read_event(json.dumps(event))


def message(**fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}], **fields}


def session(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime", **fields}}


def test_events_are_openais_types() -> None:
    event = read(type="conversation.item.create", item=message(), event_id="a")
    assert event.item.content[0].text == "Hello" and event.event_id == "a"
    event = read(**session(audio={"input": {"turn_detection": None}}))
    assert event.session.audio.input.model_dump(exclude_unset=True) == {"turn_detection": None}
    event = read(type="response.create", response={"input": [message(), {"type": "item_reference", "id": "b"}]})
    assert [item.type for item in event.response.input] == ["message", "item_reference"]
    assert read(type="response.create").response is None


WRONG = [
    ({"type": "response.creat"}, "type", "did you mean 'response.create'"),
    ({"type": 5}, "type", "unknown event type"),
    ({"type": "input_audio_buffer.append"}, "audio", "required"),
    ({"type": "input_audio_buffer.append", "audio": 5}, "audio", "string"),
    ({"type": "input_audio_buffer.commit", "voice": "a"}, "voice", "unknown parameter"),
    ({"type": "conversation.item.create"}, "item", "missing"),
    ({"type": "conversation.item.create", "item": message(role="bot")}, "item.role", "system, user, assistant"),
    ({"type": "conversation.item.create", "item": {"type": "song"}}, "item.type", "function_call"),
    ({"type": "conversation.item.create", "item": message(content=[{"type": "input_video"}])}, "item.content[0].type",
     "input_audio"),
    ({"type": "conversation.item.create", "item": message(content=[{"text": 5}])}, "item.content[0].text", "string"),
    ({"type": "conversation.item.create", "item": message(colour="red")}, "item.colour", "unknown parameter"),
    ({"type": "conversation.item.truncate", "item_id": "a", "content_index": 0}, "audio_end_ms", "required"),
    ({"type": "session.update", "session": {"type": "transcription"}}, "session.type", "/v1/audio/transcriptions"),
    (session(audio={"input": {"format": {"type": "audio/mp3"}}}), "session.audio.input.format.type", "audio/pcm"),
    (session(audio={"output": {"sped": 1.0}}), "session.audio.output.sped", "did you mean 'speed'"),
    (session(max_output_tokens="many"), "session.max_output_tokens", ""),
    (session(temperature=0.5), "session.temperature", "unknown parameter"),
    ({"type": "response.create", "response": {"input": [{"type": "item_reference"}]}}, "response.input[0].id",
     "required"),
    ({"type": "response.create", "response": {"input": 5}}, "response.input", "list"),
    ({"type": "response.create", "event_id": 5}, "event_id", "string"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "param", "words"), WRONG)
def test_errors_name_the_field(event: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(EventError) as caught:
        read(**{"event_id": "mine", **event})
    error = caught.value.as_dict()
    assert error["param"] == param and words in error["message"], error
    assert caught.value.event_id == (None if param == "event_id" else "mine")
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", '{"type": NaN}', b"\xff", "[" * 100_000])
def test_what_is_not_an_event(text: str | bytes) -> None:
    with pytest.raises(EventError) as caught:
        read_event(text)
    assert caught.value.code == "invalid_json"


def test_a_long_name_is_quick() -> None:
    with pytest.raises(EventError) as caught:
        read(type="x" * 1_000_000)
    assert len(caught.value.message) < 1000
