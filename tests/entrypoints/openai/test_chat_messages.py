# SPDX-License-Identifier: Apache-2.0
"""Messages in the forms that clients write them. Needs no model."""

import base64
import io
import json
import wave
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatMessage
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.chat_messages import AUDIO_FORMATS, read_messages
from vllm_omni.entrypoints.openai.http_errors import describe_wrong_fields
from vllm_omni.testing.media import make_audio

DATA = base64.b64encode(b"sound!").decode()
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": null}'}}
TEXT = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": None, "audio": None}
AUDIO = {"id": "audio-1", "data": DATA, "expires_at": 1, "transcript": "Hello"}


def read(messages: list[Any], **fields: Any) -> list[Any]:
    """The messages of a valid request."""
    request = OmniChatCompletionRequest.model_validate({"messages": messages, **fields})
    return [dict(message) for message in request.messages]


def read_part(part: Any) -> Any:
    (message,) = read_messages([{"role": "user", "content": [part]}])
    read([message])
    return message["content"][0]


def refusal(messages: Any, **fields: Any) -> tuple[str, str | None]:
    try:
        OmniChatCompletionRequest.model_validate({"messages": messages, **fields})
    except VLLMValidationError as error:
        return error.args[0], error.parameter
    except ValidationError as error:
        errors: list[Any] = error.errors()
        return describe_wrong_fields([{**found, "loc": ("body", *found["loc"])} for found in errors])
    raise AssertionError("the request was not refused")


ANSWERS = [
    ChatCompletionMessage.model_validate({**TEXT, "function_call": None, "tool_calls": None}),
    ChatCompletionMessage.model_validate({**TEXT, "content": None, "tool_calls": [CALL]}),
    ChatCompletionMessage.model_validate({**TEXT, "content": None, "audio": AUDIO, "tool_calls": []}),
    ChatCompletionMessage.model_validate({**TEXT, "content": None}),
    ChatCompletionMessage.model_validate({**TEXT, "content": None, "refusal": "No."}),
    ParsedChatCompletionMessage[dict].model_validate({**TEXT, "parsed": {"a": 1}, "tool_calls": None}),
    ChatMessage(role="assistant", content="Hello", reasoning="Hm."),
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    "dump",
    [
        lambda answer: answer.model_dump(),
        lambda answer: answer.model_dump(exclude_none=True),
        lambda answer: answer.model_dump(exclude_unset=True),
        lambda answer: answer.model_dump(mode="json"),
        lambda answer: json.loads(answer.model_dump_json()),
        lambda answer: dict(answer),
        lambda answer: answer.to_dict() if hasattr(answer, "to_dict") else answer.model_dump(),
    ],
)
def test_what_objects_of_clients_dump_is_history(answer: Any, dump: Any) -> None:
    message = dump(answer)
    if isinstance(message.get("tool_calls"), list):  # `dict` leaves inner objects.
        message["tool_calls"] = [c if isinstance(c, dict) else c.model_dump() for c in message["tool_calls"]]
    if message.get("audio") is not None and not isinstance(message["audio"], dict):
        message["audio"] = message["audio"].model_dump()
    (kept,) = read([message])
    assert kept["role"] == "assistant" and kept.get("content") == answer.content
    assert ("tool_calls" in kept) == bool(answer.tool_calls)
    assert None not in kept.values()


def test_tool_calls_of_a_stream_are_history() -> None:
    delta = ChoiceDeltaToolCall.model_validate({"index": 0, **CALL}).model_dump()
    (message,) = read([{"role": "assistant", "content": None, "tool_calls": [delta]}])
    assert message["tool_calls"][0]["function"] == CALL["function"]
    (message,) = read([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look"}}]}])
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize("detail", [None, "auto", "high", "original"])
def test_detail_has_no_effect(detail: str | None) -> None:
    url = "data:image/png;base64,AAAA"
    part = read_part({"type": "image_url", "image_url": {"url": url, "detail": detail}})
    assert part == {"type": "image_url", "image_url": {"url": url}}
    assert read_part({"type": "image_url", "image_url": url}) == part


@pytest.mark.parametrize(
    ("data", "name"),
    [
        *((DATA, name) for name in AUDIO_FORMATS if name != "pcm16"),
        (DATA, None),
        (DATA, "audio/webm;codecs=opus"),
        (DATA, "MP3"),
        (f"data:audio/wav;base64,{DATA}", "wav"),
        (f"data:audio/webm;codecs=opus;base64,{DATA}", None),
    ],
)
def test_sound_of_any_format_is_read(data: str, name: str | None) -> None:
    part = read_part({"type": "input_audio", "input_audio": {"data": data, "format": name}})
    assert part == {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}


def test_streamed_speech_can_be_sent_back() -> None:
    pcm = encode_audio(make_audio(0, 0.5), "pcm16", 24_000)
    sound = {"data": base64.b64encode(pcm).decode(), "format": "pcm16"}
    part = read_part({"type": "input_audio", "input_audio": sound})
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.readframes(10**6)) == (24_000, 1, pcm)


@pytest.mark.parametrize(
    ("content", "where", "words"),
    [
        (7, "content", "must be a string or a list of parts, not a number"),
        ([7], "content[0]", "must be an object with a type"),
        ([{"type": "hologram"}], "content[0].type", "'hologram'; it may be text, image_url"),
        ([{"type": "text"}], "content[0].text", "must be a string"),
        ([{"type": "text", "text": None}], "content[0].text", "must be a string"),
        ([{"type": "image_url"}], "content[0].image_url.url", "must be an address or a data URI"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "content[0].image_url.url", "must be an address"),
        ([{"type": "image_url", "image_url": {"url": "a", "detail": 5}}], "content[0].image_url.detail", "'low'"),
        ([{"type": "input_audio", "input_audio": {}}], "content[0].input_audio.data", "as base64"),
        ([{"type": "input_audio", "input_audio": "x"}], "content[0].input_audio", "object with data and format"),
        ([{"type": "input_audio", "input_audio": {"data": "A", "format": "midi"}}], "content[0].input_audio.format",
         "is 'midi'; it may be wav, mp3, flac"),
        ([{"type": "input_audio", "input_audio": {"data": "A", "format": 5}}], "content[0].input_audio.format",
         "must be a string"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_one_sentence(content: Any, where: str, words: str) -> None:
    message, parameter = refusal([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
    assert parameter == f"messages[1].{where}"
    assert message.startswith(f"messages[1].{where} ") and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("messages", "fields", "start"),
    [
        ([7], {}, "messages[0] must be an object with role and content"),
        ([{"content": "a"}], {}, "messages[0].role must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], {}, "messages[0].tool_calls must be a list, not a string"),
        ([{"role": "assistant", "tool_calls": [{"function": 1}]}], {}, "messages[0].tool_calls[0].function must be"),
        ("x", {}, "messages must be a valid list"),
        (None, {}, "messages is missing"),
        ([], {"temperature": "hot"}, "temperature must be a valid number"),
        ([], {"audio": {"format": "midi"}}, "audio.format must be 'wav', 'mp3'"),
        ([], {"stop": [1]}, "stop[0] must be a valid string"),
        ([], {"response_format": {"type": "x"}}, "response_format"),
        ([], {"tools": 1}, "tools must be"),
        ([], {"modalities": ["smell"]}, "modalities[0] must be 'text', 'audio'"),
    ],
)
def test_a_wrong_field_is_one_sentence(messages: Any, fields: dict[str, Any], start: str) -> None:
    message, _ = refusal(messages, **fields)
    assert message.startswith(start) and "\n" not in message and len(message) < 300, message


def test_null_is_absent() -> None:
    names = [name for name in OmniChatCompletionRequest.model_fields if name != "messages"]
    nulls = dict.fromkeys(names)
    request = OmniChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **nulls})
    assert request.model_fields_set == {"messages"}


def test_other_values_are_kept() -> None:
    assert read_messages("x") == "x"
    part = {"type": "image_url", "image_url": None, "uuid": "a"}
    assert read_messages([{"role": "user", "content": [part, "b"]}])[0]["content"] == [part, "b"]
    with pytest.raises(VLLMValidationError):
        read_messages([None])
