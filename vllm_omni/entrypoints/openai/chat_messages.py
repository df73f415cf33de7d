# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat request, in the forms that clients write them, as vLLM and the chat templates read them.

What is wrong in a message is refused here, by name: vLLM's own types of messages are unions, whose errors are lists.
"""

import base64
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.audio_formats import wav_header
from vllm_omni.entrypoints.openai.stage_params import without_nulls
from vllm_omni.vllm_versions import MM_PARSER_MAP

AUDIO_FORMATS = ("wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm", "pcm16")
"""Of `input_audio`. Its file says what it is, except for pcm16."""

PCM_RATE = 24_000
"""Samples per second of pcm16, as in OpenAI's API: one channel."""

_OTHER_NAMES = {
    "mpeg": "mp3", "mpga": "mp3", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav", "x-flac": "flac", "oga": "ogg",
    "weba": "webm", "x-m4a": "m4a", "pcm": "pcm16", "l16": "pcm16",
}  # fmt: skip
_PARTS = ("text", "image_url", "input_audio", "audio_url", "video_url")
_URLS = ("image_url", "audio_url", "video_url")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(messages: Any) -> Any:
    """
    Args:
        messages: The field of a request. Anything but a list of objects is returned as it is.

    Returns:
        The messages without null fields, and with media parts in one form each.

    Raises:
        VLLMValidationError: A message or a part of one is wrong; names it, and the remedy.
    """
    if not isinstance(messages, list):
        return messages
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> Any:
    if not isinstance(message, Mapping):
        raise _refusal(where, "must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise _refusal(f"{where}.role", "must be a string, such as 'user'")
    read = without_nulls(message)
    if "content" in read:
        read["content"] = _read_content(read["content"], f"{where}.content")
    if "tool_calls" in read:
        read["tool_calls"] = _read_tool_calls(read["tool_calls"], f"{where}.tool_calls")
        if not read["tool_calls"]:
            del read["tool_calls"]
    return read


def _read_content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(where, f"must be a string or a list of parts, not {_kind(content)}")
    return [read_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def read_part(part: Any, where: str) -> Any:
    """One part of a message's content; see `read_messages`."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refusal(where, f"must be an object with a type, not {_kind(part)}")
    if part.get("uuid") is not None:  # vLLM's, for media that it has: they may be null.
        return part
    read = without_nulls(part)
    kind = read.get("type")
    if kind in _TEXTS:
        if not isinstance(read.get(_TEXTS[kind]), str):
            raise _refusal(f"{where}.{_TEXTS[kind]}", "must be a string")
    elif kind in _URLS:
        read[kind] = {"url": _read_url(read.get(kind), f"{where}.{kind}")}
    elif kind == "input_audio":
        read[kind] = _read_sound(read.get(kind), f"{where}.{kind}")
    elif "type" in read and kind not in MM_PARSER_MAP:
        raise _refusal(f"{where}.type", f"is {kind!r}; it may be {_any_of(_PARTS)}")
    return read


def _read_url(value: Any, where: str) -> str:
    """`detail` has no effect here."""
    detail = value.get("detail") if isinstance(value, Mapping) else None
    if detail is not None and not isinstance(detail, str):
        raise _refusal(f"{where}.detail", f"must be 'auto', 'low' or 'high', not {_kind(detail)}")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise _refusal(f"{where}.url", "must be an address or a data URI")
    return url


def _read_sound(value: Any, where: str) -> dict[str, str]:
    """vLLM takes two formats, and reads the file's own."""
    if not isinstance(value, Mapping):
        raise _refusal(where, "must be an object with data and format")
    data, name = value.get("data"), value.get("format")
    if not isinstance(data, str) or not data:
        raise _refusal(f"{where}.data", "must be a file as base64")
    if name is not None and not isinstance(name, str):
        raise _refusal(f"{where}.format", f"must be a string, not {_kind(name)}")
    if name:
        kind = name.partition(";")[0].strip().lower().removeprefix("audio/").removeprefix("video/")
        kind = _OTHER_NAMES.get(kind, kind)
        if kind not in AUDIO_FORMATS:
            raise _refusal(f"{where}.format", f"is {name[:40]!r}; it may be {_any_of(AUDIO_FORMATS)}")
        data = _strip_header(data)
        if kind == "pcm16":
            data = _as_wav(data, f"{where}.data")
    return {"data": _strip_header(data), "format": "wav"}


def _strip_header(data: str) -> str:
    """base64 that may be a data URI."""
    end = data[:256].lower().find(";base64,") if data[:5].lower() == "data:" else -1
    return data if end < 0 else data[end + len(";base64,") :]


def _as_wav(data: str, where: str) -> str:
    try:
        samples = base64.b64decode(data)
    except ValueError as error:
        raise _refusal(where, f"is no base64: {error}") from error
    samples = samples[: len(samples) // 2 * 2]
    return base64.b64encode(wav_header(PCM_RATE, 1, len(samples)) + samples).decode()


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refusal(where, f"must be a list, not {_kind(calls)}")
    return [_read_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _read_tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _refusal(where, f"must be an object with id, type and function, not {_kind(call)}")
    read = {"type": "function", **without_nulls(call)}
    if read["type"] == "function":
        function = read.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refusal(f"{where}.function", "must be an object with name and arguments")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | Mapping):
            raise _refusal(f"{where}.function.arguments", f"must be a JSON object in a string, not {_kind(arguments)}")
        read["function"] = {"name": function["name"], "arguments": "{}" if arguments is None else arguments}
    return read


def _refusal(where: str, reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"{where} {reason}", parameter=where)


def _any_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _kind(value: Any) -> str:
    """JSON's name of a value's type."""
    names: dict[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
