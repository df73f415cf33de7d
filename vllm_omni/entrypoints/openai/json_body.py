# SPDX-License-Identifier: Apache-2.0
"""JSON of clients: strict, of a limited number of values, and checked at a cost that its bytes limit; a large one in a
thread.

Bytes alone are no limit: a list of a million zeros has 2 MB, and an error of pydantic for each of them takes 1.5 GB.
Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema

OBJECT_VALUES = 10
"""As many values an object counts, which takes as much memory."""

LARGE_BYTES, LARGE_VALUES = 1 << 20, 10_000
"""JSON of as many bytes or values is read and checked in a thread."""

VALUE_BYTES = 40
"""What a value takes, about."""
_ANY_BYTES = 100
"""The same of a value of any type, beside the text in it."""

_TOKENS = re.compile(rb'"[^"]*"?|[,\[{]')
_COSTS = {ord(","): 1, ord("["): 1, ord("{"): OBJECT_VALUES, ord('"'): 0}
_COLLECTIONS = ("list", "tuple", "set", "frozenset", "dict")
_NO_SCHEMAS = ("metadata", "serialization", "default", "expected", "config", "cls")


class InvalidJsonError(ValueError):
    """What is wrong with it."""


class TooManyValuesError(InvalidJsonError):
    """It has more values than the limit."""


@dataclass(frozen=True)
class JsonBody:
    """
    Attributes:
        num_bytes, num_values: An object counts as `OBJECT_VALUES`.
    """

    value: Any
    num_bytes: int = 0
    num_values: int = 0

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= LARGE_BYTES or self.num_values >= LARGE_VALUES


def num_bytes(value: Any) -> int:
    """About how much memory a value takes."""
    if isinstance(value, str | bytes):
        return _ANY_BYTES + len(value)
    if isinstance(value, np.ndarray):
        return _ANY_BYTES + value.nbytes
    if isinstance(value, BaseModel):
        value = vars(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | deque):
        return _ANY_BYTES
    return _ANY_BYTES + sum(map(num_bytes, value))


def count_values(text: bytes, limit: int) -> int:
    """The values of JSON, of which an object counts as `OBJECT_VALUES`; at most `limit` + 1.

    Below the limit it is not exact: commas and brackets inside of strings count, too.
    """
    count = 1 + text.count(b",") + text.count(b"[") + OBJECT_VALUES * text.count(b"{")
    if count <= limit:
        return count
    count = 1
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")  # Every quote is now an end of a string.
    for number, token in enumerate(_TOKENS.finditer(bare)):
        count += _COSTS[token[0][0]]
        if count > limit or number > 4 * limit:  # Valid JSON has fewer strings.
            return limit + 1
    return count


def decode(text: bytes | str, max_values: int) -> JsonBody:
    """
    Raises:
        InvalidJsonError: It is not JSON; Python's own reader accepts more.
        TooManyValuesError: It has more than `max_values`; it was not read.
    """
    data = text.encode() if isinstance(text, str) else text
    num_values = count_values(data, max_values)
    if num_values > max_values:
        raise TooManyValuesError(f"has more than {max_values} values (an object counts as {OBJECT_VALUES})")
    try:
        return JsonBody(msgspec.json.decode(data), len(data), num_values)
    except RecursionError as error:
        raise InvalidJsonError("is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise InvalidJsonError("is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise InvalidJsonError(f"is not JSON: {error}") from error


@functools.cache
def validator_of(model: Any) -> SchemaValidator:
    """Pydantic's validator of a type, of which every collection ends at its first error. So the errors of a value are
    as many as the type has fields and alternatives, however large the value is."""
    adapter = TypeAdapter(model)
    adapter.rebuild()  # Some types defer it to their first use.
    return bounded_validator(adapter.core_schema)


def bounded_validator(schema: CoreSchema) -> SchemaValidator:
    """Pydantic's validator of a schema, see `validator_of`."""
    return SchemaValidator(_bounded(schema), _use_prebuilt=False)


def _bounded(node: Any, forbids_others: bool = False) -> Any:
    """A schema whose collections end at their first error.

    Args:
        forbids_others: It belongs to a model that has an error for each unknown field.
    """
    if isinstance(node, list | tuple):
        return type(node)(_bounded(each, forbids_others) for each in node)
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "model":
        forbids_others = node.get("config", {}).get("extra_fields_behavior") == "forbid"
    bounded = {key: value if key in _NO_SCHEMAS else _bounded(value, forbids_others) for key, value in node.items()}
    if kind in _COLLECTIONS:
        bounded["fail_fast"] = True
    if kind == "model-fields" and forbids_others:
        return core_schema.no_info_before_validator_function(_limit_fields(2 * len(node["fields"]) + 10), bounded)
    return bounded


def _limit_fields(limit: int) -> Callable[[Any], Any]:
    def check(data: Any) -> Any:
        if isinstance(data, Mapping) and len(data) > limit:
            raise PydanticCustomError("too_many_fields", "should have at most {limit} fields", {"limit": limit})
        return data

    return check


async def validated(validator: SchemaValidator, body: JsonBody) -> Any:
    """The value of a body as the validator's type. A large one is checked in a thread.

    Raises:
        RequestValidationError: A field is wrong.
    """
    found: list[Any]
    try:
        if body.is_large:
            return await asyncio.to_thread(validator.validate_python, body.value)
        return validator.validate_python(body.value)
    except ValidationError as error:
        found = [*error.errors(include_url=False, include_input=False)]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # Raised by validators of vLLM's that read the raw fields, if one is missing or has another type.
        found = [{"type": "value_error", "loc": (), "msg": f"a field is missing or has a wrong type: {error}"}]
    raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in found])
