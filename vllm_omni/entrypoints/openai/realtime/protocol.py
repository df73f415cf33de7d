# SPDX-License-Identifier: Apache-2.0
"""Events of OpenAI's Realtime API: what clients send, read with the types of OpenAI's package, and their errors.

Knows what an event may hold, not what a session does with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from openai.types.realtime import (
    ConversationItemCreateEvent,
    ConversationItemDeleteEvent,
    ConversationItemRetrieveEvent,
    ConversationItemTruncateEvent,
    InputAudioBufferAppendEvent,
    InputAudioBufferClearEvent,
    InputAudioBufferCommitEvent,
    RealtimeConversationItemAssistantMessage,
    RealtimeConversationItemFunctionCall,
    RealtimeConversationItemFunctionCallOutput,
    RealtimeConversationItemSystemMessage,
    RealtimeConversationItemUserMessage,
    RealtimeFunctionTool,
    RealtimeResponseCreateParams,
    RealtimeSessionCreateRequest,
    ResponseCancelEvent,
    ResponseCreateEvent,
)
from openai.types.realtime.response_item_reference import ResponseItemReference
from pydantic import BaseModel, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

from vllm_omni.config.utils import nearest
from vllm_omni.entrypoints.openai.json_body import InvalidJsonError, TooManyValuesError, decode, validator_of
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits, flag

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]

_EVENTS: dict[str, type[BaseModel]] = {
    "conversation.item.create": ConversationItemCreateEvent,
    "conversation.item.delete": ConversationItemDeleteEvent,
    "conversation.item.retrieve": ConversationItemRetrieveEvent,
    "conversation.item.truncate": ConversationItemTruncateEvent,
    "input_audio_buffer.append": InputAudioBufferAppendEvent,
    "input_audio_buffer.clear": InputAudioBufferClearEvent,
    "input_audio_buffer.commit": InputAudioBufferCommitEvent,
    "response.cancel": ResponseCancelEvent,
    "response.create": ResponseCreateEvent,
}
SESSION_UPDATE = "session.update"
_MESSAGES: dict[str, type[BaseModel]] = {
    "system": RealtimeConversationItemSystemMessage,
    "user": RealtimeConversationItemUserMessage,
    "assistant": RealtimeConversationItemAssistantMessage,
}
_ITEMS: dict[str, type[BaseModel]] = {
    "function_call": RealtimeConversationItemFunctionCall,
    "function_call_output": RealtimeConversationItemFunctionCallOutput,
}
_REFERENCE = "item_reference"

_ADDED: dict[type[BaseModel], set[str]] = {RealtimeFunctionTool: {"strict"}}
"""Fields that OpenAI's types do not have."""

_MAX_NAME = 100  # Characters of a client's name in an error.


class EventError(Exception):
    """What is wrong with a client's event, as OpenAI's `error` object; the session goes on.

    A request to the pipeline that was refused, or failed, is one, too: as its client is told.

    Attributes:
        event_id: The client's id of the event, if it has one.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_value", type: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.type = message, param, code, type
        self.event_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


def new_id(prefix: str) -> str:
    """A random id, in the form of OpenAI's."""
    return f"{prefix}_{random_uuid()[:24]}"


def read_event(
    text: str | bytes,
    max_values: int = RealtimeLimits.max_realtime_message_values,
    types: Mapping[str, type[BaseModel]] | None = None,
) -> Any:
    """One of OpenAI's client events, with all fields checked.

    `session` of a `session.update` is a `RealtimeSessionCreateRequest`; `input` of a response may have
    `ResponseItemReference`s.

    Args:
        types: Of the events of another API, by their names, in place of OpenAI's.

    Raises:
        EventError: It is not one; names the field.
    """
    data = _decode(text, max_values)
    event_id = data.get("event_id")
    try:
        if event_id is not None and not isinstance(event_id, str):
            event_id = None
            raise EventError("event_id must be a string", "event_id", "invalid_type")
        return _read(data) if types is None else _validate(_type_of(data, types), data, ())
    except EventError as error:
        error.event_id = event_id
        raise


def _decode(text: str | bytes, max_values: int) -> dict[str, Any]:
    try:
        data = decode(text, max_values).value
    except TooManyValuesError as error:
        raise EventError(f"the event {error}, which is the limit ({flag('max_realtime_message_values')})") from error
    except InvalidJsonError as error:
        raise EventError(f"the event {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise EventError("an event is a JSON object with a type", code="invalid_json")
    return data


def _read(data: dict[str, Any]) -> Any:
    event_type = data.get("type")
    if event_type == SESSION_UPDATE:
        return _SessionUpdate(event_id=data.get("event_id"), session=read_session(_take(data, "session")))
    model = _type_of(data, {**_EVENTS, SESSION_UPDATE: _SessionUpdate})
    if model is ConversationItemCreateEvent:
        data = {**data, "item": read_item(_take(data, "item"), ("item",))}
    if model is ResponseCreateEvent and data.get("response") is not None:
        return _read_response_create(data)
    return _validate(model, data, ())


def _type_of(data: dict[str, Any], known: Mapping[str, type[BaseModel]]) -> type[BaseModel]:
    event_type = data.get("type")
    model = known.get(event_type) if isinstance(event_type, str) else None
    if model is None:
        name = str(event_type)[:_MAX_NAME]
        raise EventError(f"unknown event type {name!r}{nearest(name, known)} (known: {', '.join(known)})", "type")
    return model


class _SessionUpdate(BaseModel):
    type: str = SESSION_UPDATE
    event_id: str | None
    session: RealtimeSessionCreateRequest


def _read_response_create(data: dict[str, Any]) -> ResponseCreateEvent:
    """OpenAI's type has no references among the items of the input, its API has."""
    response = _take(data, "response")
    items = response.get("input")
    event = _validate(ResponseCreateEvent, {**data, "response": None}, ())
    params = {name: value for name, value in response.items() if name != "input"}
    event.response = _validate(RealtimeResponseCreateParams, params, ("response",))
    if items is not None:
        if not isinstance(items, list):
            raise EventError("response.input must be a list of items", "response.input", "invalid_type")
        event.response.input = [
            read_item(item, ("response", "input", i), may_refer=True) for i, item in enumerate(items)
        ]
    return event


def read_session(session: Any) -> RealtimeSessionCreateRequest:
    """The configuration of a session.

    Raises:
        EventError: It is wrong, or of a session without responses.
    """
    if not isinstance(session, dict):
        raise EventError("session must be an object", "session", "invalid_type")
    if session.get("type") == "transcription":
        raise EventError(
            "transcription sessions are not supported; set audio.input.transcription of a realtime session, or use "
            "/v1/audio/transcriptions",
            "session.type",
        )
    return _validate(RealtimeSessionCreateRequest, session, ("session",))


def read_item(item: Any, at: Path, *, may_refer: bool = False) -> Any:
    """An item of a conversation, of OpenAI's types.

    Raises:
        EventError: It is wrong, or of another kind.
    """
    if not isinstance(item, dict):
        raise EventError(f"{_name(at)} must be an object", _name(at), "invalid_type")
    kinds = {"message": None, **_ITEMS, **({_REFERENCE: ResponseItemReference} if may_refer else {})}
    kind = _choice(item, "type", kinds, at)
    model = kinds[kind] or _MESSAGES[_choice(item, "role", _MESSAGES, at)]
    return _validate(model, item, at)


def _choice(item: dict[str, Any], field: str, known: dict[str, Any], at: Path) -> str:
    value = item.get(field)
    if isinstance(value, str) and value in known:
        return value
    name = _name((*at, field))
    if value is None:
        raise EventError(f"{name} is missing; it is one of {', '.join(known)}", name, "missing_required_parameter")
    raise EventError(f"{name} must be one of {', '.join(known)}, not {str(value)[:_MAX_NAME]!r}", name)


def _take(data: dict[str, Any], field: str) -> dict[str, Any]:
    value = data.get(field)
    if value is None:
        raise EventError(f"{field} is missing", field, "missing_required_parameter")
    if not isinstance(value, dict):
        raise EventError(f"{field} must be an object", field, "invalid_type")
    return value


def _validate(model: type[Model], data: dict[str, Any], at: Path) -> Model:
    value = read_fields(model, data, at)
    _refuse_unknown(value, at)
    return value


def read_fields(model: type[Model], data: dict[str, Any], at: Path) -> Model:
    """An object of a type, which may keep fields that it does not have.

    Args:
        at: Where it is in the event.

    Raises:
        EventError: A field is wrong.
    """
    try:
        return validator_of(model).validate_python(data)
    except ValidationError as error:
        raise _as_event_error(error, data, at) from error
    except VLLMValidationError as error:
        raise EventError(str(error.args[0]), _name((*at, error.parameter)) if error.parameter else None) from error
    except RecursionError as error:
        raise EventError("the event is nested too deeply", _name(at) or None) from error


def _as_event_error(error: ValidationError, data: Any, at: Path) -> EventError:
    """The error of the field that is deepest in the event: one of a union reports those of all its members."""
    found = [(_path_in(data, each["loc"]), each) for each in error.errors(include_url=False, include_input=False)]
    path, first = max(found, key=lambda each: len(each[0]))
    name = _name((*at, *path))
    is_missing = first["type"] == "missing"
    code = "missing_required_parameter" if is_missing else "invalid_value"
    return EventError(f"{name}: {first['msg']}", name, code)


def _path_in(data: Any, location: Sequence[str | int]) -> Path:
    """Pydantic's location without the names of types; a field that is missing is the last part."""
    path: list[str | int] = []
    for part in location:
        if part in (data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()):
            data = data[part]
        elif part != location[-1] or not isinstance(data, dict):
            continue
        path.append(part)
    return tuple(path)


def _name(path: Path) -> str:
    """`item.content[0].text`"""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def _refuse_unknown(value: Any, at: Path) -> None:
    """OpenAI's types keep fields that they do not have."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            _refuse_unknown(each, (*at, i))
    if not isinstance(value, BaseModel):
        return
    fields = type(value).model_fields
    for unknown in set(value.model_extra or ()) - _ADDED.get(type(value), set()):
        name = _name((*at, unknown[:_MAX_NAME]))
        hint = nearest(unknown[:_MAX_NAME], fields)
        raise EventError(f"unknown parameter {name!r}{hint}", name, "unknown_parameter")
    for field in value.model_fields_set:
        _refuse_unknown(getattr(value, field), (*at, field))
