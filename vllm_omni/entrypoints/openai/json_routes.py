# SPDX-License-Identifier: Apache-2.0
"""How endpoints get the JSON of a request: checked at a cost that its size limits, a large one in a thread.

FastAPI would decode it a second time, on the event loop, and make an error of pydantic for each wrong value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, params
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, request_response
from pydantic import ValidationError
from pydantic_core import SchemaValidator

from vllm_omni.entrypoints.openai.json_body import JsonBody, bounded_validator
from vllm_omni.entrypoints.openai.request_context import RequestContext


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


def bound_json_routes(app: FastAPI) -> None:
    """Has the routes of an application take their JSON from the `RequestContext`, and check it with a
    `bounded_validator`. FastAPI would decode it again, on the event loop, and make an error for each value."""
    for route in app.router.routes:
        field = route.body_field if isinstance(route, APIRoute) else None
        if isinstance(route, APIRoute) and field is not None and not isinstance(field.field_info, params.Form):
            # FastAPI takes single fields out of a dict.
            make = dict if route._embed_body_fields else _as_it_is
            route.app = request_response(_json_handler(field, route.get_route_handler(), make))
            field.__class__ = _CheckedField


def _json_handler(
    field: ModelField, handle: Callable[[Request], Awaitable[Response]], make: Callable[[Any], Any]
) -> Callable[[Request], Awaitable[Response]]:
    validator = bounded_validator(field._type_adapter.core_schema)

    async def handle_json(request: Request) -> Response:
        body = RequestContext.of(request).take_json()
        if body is not None:
            request = _CheckedRequest(request.scope, request.receive, request._send)
            request.checked = make(await validated(validator, body))
        elif await request.body():
            kind = request.headers.get("content-type")
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send application/json, not {kind}")
        return await handle(request)

    return handle_json


def _as_it_is(checked: Any) -> Any:
    return checked


class _CheckedRequest(Request):
    """A request whose JSON was read and checked."""

    checked: Any

    async def json(self) -> Any:
        return self.checked


class _CheckedField(ModelField):
    def validate(self, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[dict[str, Any]]]:
        return value, []
