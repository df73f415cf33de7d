# SPDX-License-Identifier: Apache-2.0
"""What every HTTP request passes before an endpoint sees it: the key, the size of its body, and strict JSON.

Plain ASGI, so that streamed answers and disconnects pass through untouched. Knows no endpoint but those of health.
"""

import argparse
import asyncio
import hashlib
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni.entrypoints.openai.http_errors import error_response
from vllm_omni.entrypoints.openai.limits import (
    MIB,
    MediaCount,
    RequestLimits,
    ServerLimits,
    flag,
    limits_from,
    media_count,
)
from vllm_omni.entrypoints.openai.memory import GarbageMiddleware

# Whoever keeps the server running must be able to ask how it is; the answer tells nothing of users or models.
# /metrics is not among them: it names models and shows the traffic, and Prometheus can send a key.
OPEN_PATHS = ("/health", "/ping")

_BODY_RETRY_S = 1


def add_middleware(app: FastAPI, args: argparse.Namespace) -> None:
    """Adds ours outside of vLLM's own: the key is checked first, then the body."""
    total = limits_from(args, ServerLimits).max_total_request_bytes
    app.add_middleware(GarbageMiddleware)
    app.add_middleware(BodyMiddleware, limits=limits_from(args, RequestLimits), max_total_bytes=total)
    if tokens := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
        app.add_middleware(ApiKeyMiddleware, tokens=tokens)


class ApiKeyMiddleware(AuthenticationMiddleware):
    """vLLM's guards the paths that it knows of; this one guards every path but `OPEN_PATHS`."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # A browser asks with OPTIONS whether it may send a key at all.
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = Headers(scope=scope)
        if path in OPEN_PATHS:
            return self.app(scope, receive, send)
        if self.verify_token(headers):
            key = headers["Authorization"].partition(" ")[2]
            scope.setdefault("state", {})["api_key_hash"] = hashlib.sha256(key.encode()).digest()
            return self.app(scope, receive, send)
        response = error_response(
            "this server wants its API key: send it as 'Authorization: Bearer KEY'",
            HTTPStatus.UNAUTHORIZED,
            {"WWW-Authenticate": "Bearer"},
        )
        return response(scope, receive, send)


def owner_of(request: Request) -> bytes:
    """The SHA-256 of the API key that a request was sent with; empty where the server has no keys."""
    return getattr(request.state, "api_key_hash", b"")


class BodyMiddleware:
    """Refuses bodies that are too large, before or while they are read, and JSON that is none.

    The bytes of all bodies together are bounded too. A body counts until its request has been answered in full, because
    the framework and the handlers hold it, or what they made of it, until then. A body beyond the bound is refused and
    does not wait: bodies that wait half read would hold the bytes that the others wait for.

    Python's JSON reader takes more than JSON is: NaN, numbers beyond all bounds, halves of surrogate pairs, other
    encodings than UTF-8. Whatever met these later would fail somewhere where nobody can say what was wrong.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, max_total_bytes: int) -> None:
        self.app = app
        self._max_bytes = limits.max_request_bytes
        self._max_total_bytes = max_total_bytes
        self._total_bytes = 0
        self._max_media_parts = limits.max_media_parts
        self._too_large = (
            f"the body has more than {self._max_bytes} bytes; the server takes no more ({flag('max_request_bytes')})"
        )
        self._no_room = (
            f"the bodies of all requests would have more than {max_total_bytes} bytes "
            f"({flag('max_total_request_bytes')}); try again later"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        media_count.set(MediaCount(self._max_media_parts))
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        with self._counted(receive) as counted:
            if refusal := self._refusal(int(length[:20]) if length.isdecimal() else 0):
                await _refuse(refusal, scope, receive, send)
            elif _is_json(headers):
                await self._check_json(scope, counted, send)
            else:
                await self.app(scope, counted, send)

    async def _check_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = []
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                chunks.append(message.get("body", b""))
                if not message.get("more_body", False):
                    break
        except HTTPException as refusal:
            await _refuse(refusal, scope, receive, send)
            return
        body = b"".join(chunks)
        chunks.clear()
        if fault := await _find_fault(body):
            await error_response(fault, HTTPStatus.BAD_REQUEST)(scope, receive, send)
        else:
            await self.app(scope, _replayed(body, receive), send)

    @contextmanager
    def _counted(self, receive: Receive) -> Iterator[Receive]:
        """`receive`, which raises as soon as the body is too large; the framework turns that into the answer."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            added = len(message.get("body", b""))
            if refusal := self._refusal(num_bytes + added, num_counted=num_bytes):
                raise refusal
            num_bytes += added
            self._total_bytes += added
            return message

        try:
            yield counted
        finally:
            self._total_bytes -= num_bytes

    def _refusal(self, num_bytes: int, num_counted: int = 0) -> HTTPException | None:
        """Why a body of so many bytes is not read, of which some have been counted; None if it is."""
        if num_bytes > self._max_bytes:
            return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
        if self._total_bytes + num_bytes - num_counted > self._max_total_bytes:
            return HTTPException(HTTPStatus.TOO_MANY_REQUESTS, self._no_room, {"Retry-After": str(_BODY_RETRY_S)})
        return None


async def _refuse(refusal: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(refusal.headers or {})
    await error_response(refusal.detail, HTTPStatus(refusal.status_code), headers)(scope, receive, send)


def _is_json(headers: Headers) -> bool:
    subtype = headers.get("content-type", "").partition(";")[0].strip().lower()
    return subtype == "application/json" or subtype.endswith("+json")


async def _find_fault(body: bytes) -> str | None:
    """What is wrong with a body that should be JSON; None if nothing is, or if there is none."""
    if not body:
        return None  # The endpoint says which fields it wants.
    if len(body) < MIB:
        return _fault_of(body)
    return await asyncio.to_thread(_fault_of, body)


def _fault_of(body: bytes) -> str | None:
    try:
        msgspec.json.decode(body)
    except RecursionError:
        return "the JSON body is nested too deeply"
    except UnicodeDecodeError:
        return "the JSON body is not UTF-8"
    except msgspec.DecodeError as error:
        return f"the body is not JSON: {error}"
    return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read already, and then what else comes: that the client has left."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
