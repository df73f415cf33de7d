# SPDX-License-Identifier: Apache-2.0
"""What every HTTP request passes before its endpoint: API key, limits of the body, strict JSON and the check of its
fields, garbage collection.

Plain ASGI, so that streamed answers and disconnects pass unchanged. An answer is given to the web server in pieces, so
that what the client has not read waits here, as part of a request that counts. Knows no endpoint but those that need no
key.
"""

import argparse
import asyncio
import gc
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import FastAPI, HTTPException, Request, Response, params
from fastapi._compat import ModelField
from fastapi.routing import APIRoute, request_response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni.entrypoints.openai.file_store import is_file_path
from vllm_omni.entrypoints.openai.http_errors import error_response, on_unknown_error
from vllm_omni.entrypoints.openai.json_body import (
    LARGE_BYTES,
    VALUE_BYTES,
    InvalidJsonError,
    JsonBody,
    TooManyValuesError,
    bounded_validator,
    decode,
    validated,
)
from vllm_omni.entrypoints.openai.realtime.client_secrets import ClientSecrets, sent_key
from vllm_omni.entrypoints.openai.realtime.event_session import Sessions
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget
from vllm_omni.entrypoints.openai.request_context import SCOPE_KEY, RequestContext
from vllm_omni.entrypoints.openai.server_args import MIB, RequestLimits, ServerLimits, flag, limits_from
from vllm_omni.entrypoints.root_path import RootPathMiddleware

# Probes have no key, and the answers name no users or models. /metrics does, and Prometheus can send a key.
OPEN_PATHS = ("/health", "/ping", "/readyz")

FRONT_PATH = "/"
"""Open, too; who sends a key sees more there."""

DOCS_PATHS = ("/docs", "/openapi.json", "/static/swagger-ui-bundle.js", "/static/swagger-ui.css")
"""The page, its data, and vLLM's copies of Swagger's files, which it serves with `--enable-offline-docs`. Open for GET
and HEAD: a browser sends no key, and they name no users or models."""

PUBLIC_LISTS = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
"""What `--public-lists` opens, for GET and HEAD. Without a key the last has the model's own voices only."""

PLAYGROUND_PATH = "/playground/"
"""Below it the page asks for a name and a password: a browser sends no key."""

EXPOSED_HEADERS = (
    "Retry-After", "X-Request-Id", "X-Sample-Rate", "X-Channels", "X-Finish-Reason", "Warning", "Accept-Ranges",
    "Content-Range",
)  # fmt: skip
"""What a page of another site may read, besides what every page may."""

COLLECT_AFTER_BYTES = 64 * MIB

BODY_TIMEOUT_S = 30.0
"""How long a body may be slower than its lowest rate."""

_PIECE_BYTES = 1 << 16

_BODY_RETRY_S = 1

_WITH_BODY = ("POST", "PUT", "PATCH")

_MAX_NAME = 100  # Characters of a client's word in an error.

Count: TypeAlias = Callable[[int], None]
"""Counts further bytes of a request."""


def add_middleware(app: FastAPI, args: argparse.Namespace) -> None:
    """Adds ours outside of vLLM's own: the request gets its context, then the key is checked, then the body.

    Sets `app.state.client_secrets` and `omni_sessions`. vLLM's check of the key, which ours replaces, is removed; its
    headers for pages of other sites (CORS) are added outside of all others.
    """
    replaced: tuple[Any, ...] = (AuthenticationMiddleware, CORSMiddleware)
    cors = next((each.kwargs for each in app.user_middleware if each.cls is replaced[1]), None)
    app.user_middleware[:] = [each for each in app.user_middleware if each.cls not in replaced]
    app.state.client_secrets, app.state.omni_sessions = ClientSecrets(), Sessions(args)
    if app.root_path:
        app.add_middleware(RootPathMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyMiddleware, limits_from(args, RequestLimits), limits_from(args, ServerLimits))
    if tokens := api_keys(args):
        app.add_middleware(
            ApiKeyMiddleware,
            tokens=tokens,
            secrets=app.state.client_secrets,
            has_playground=args.playground,
            public=(FRONT_PATH, *DOCS_PATHS, *(PUBLIC_LISTS if args.public_lists else ())),
        )
    app.add_middleware(ContextMiddleware, app.state.omni_sessions.budget)
    if cors is not None:  # A page of another site can read an answer only if it passes this one, refusals too.
        app.add_middleware(ServerErrorMiddleware, handler=on_unknown_error)
        options: dict[str, Any] = {**cors, "expose_headers": EXPOSED_HEADERS}
        app.add_middleware(CORSMiddleware, **options)


def api_keys(args: argparse.Namespace) -> list[str]:
    """The keys of the server, any of which a request must have; empty: none."""
    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


class ContextMiddleware:
    """Makes the `RequestContext` of a request, which holds a slot of the pipeline until its answer has been sent."""

    def __init__(self, app: ASGIApp, budget: SessionBudget) -> None:
        self.app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = scope[SCOPE_KEY] = RequestContext.start()
        context.address, context.budget = (scope.get("client") or ("",))[0], self._budget
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with context.answering():
            await self.app(scope, receive, in_pieces(send))


def in_pieces(send: Send) -> Send:
    """A `send` that returns when the web server holds no more than about a piece of what was sent."""

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _PIECE_BYTES:
            await send(message)
            return
        for start in range(0, len(body), _PIECE_BYTES):
            await send({**message, "body": bytes(body[start : start + _PIECE_BYTES]), "more_body": True})
        if not message.get("more_body", False):
            await send({**message, "body": b"", "more_body": False})  # waits for the last piece

    return send_pieces


class HeadMiddleware:
    """Answers HEAD as GET, without the body: FastAPI's routes for GET do not."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self.app({**scope, "method": "GET"}, receive, send_head)
        else:
            await self.app(scope, receive, send)


class ApiKeyMiddleware(AuthenticationMiddleware):
    """vLLM's checks the key for the paths in its own list; this one for every path but `OPEN_PATHS`, the pages and
    files whose name is the secret.

    A WebSocket may have an ephemeral key. A key that is sent to one of the `public` paths is checked.
    """

    def __init__(
        self, app: ASGIApp, tokens: list[str], secrets: ClientSecrets, has_playground: bool, public: Collection[str]
    ) -> None:
        super().__init__(app, tokens)
        self._secrets, self._has_playground, self._public = secrets, has_playground, public

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # A browser's preflight request, which has no key, is answered outside of this.
        if scope["type"] not in ("http", "websocket"):
            return self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS or (self._has_playground and f"{path}/".startswith(PLAYGROUND_PATH)):
            return self.app(scope, receive, send)
        key = sent_key(scope)
        # Clients download the file of an answer without the key: its name is as secret.
        is_open = is_file_path(path) or (not key and path in self._public)
        if is_open and scope.get("method") in ("GET", "HEAD"):
            return self.app(scope, receive, send)
        if self.verify_token(Headers({"Authorization": f"Bearer {key}"})):
            scope[SCOPE_KEY].owner = hashlib.sha256(key.encode()).digest()
            return self.app(scope, receive, send)
        if scope["type"] == "websocket" and (secret := self._secrets.find(key)):
            scope[SCOPE_KEY].owner = secret.owner
            return self.app(scope, receive, send)
        response = error_response(
            "the API key is missing or wrong; send 'Authorization: Bearer KEY', or 'X-Api-Key: KEY'",
            HTTPStatus.UNAUTHORIZED,
            {"WWW-Authenticate": "Bearer"},
        )
        return response(scope, receive, send)


class BodyMiddleware:
    """Refuses bodies that are too large or too slow, before or while they are read; of another encoding or without a
    type; and JSON that is invalid or has too many values. The context gets the JSON.

    The bytes of all bodies together are limited too, and those of one client: of an API key, or of an address where
    there are no keys. (On a Unix socket there may be neither.) A body counts until its request has been answered in
    full, because the framework and the handlers hold it, or objects made of it, until then; so large JSON counts with
    what its values take. A body beyond the limit is refused at once: bodies that wait half read would hold the bytes
    that the others wait for.

    Python's JSON reader accepts more than JSON: NaN, numbers out of range, halves of surrogate pairs, other encodings
    than UTF-8. These would fail later, with an error that does not name the body.

    Python's garbage collector runs after each `COLLECT_AFTER_BYTES` of bodies. vLLM and pydantic build reference cycles
    of a chat request, which hold its media as they were sent. Only the collector frees them, and Python starts a full
    run by the number of new objects: after about a thousand requests, however large they are. A run takes a few
    milliseconds, since vLLM has frozen (`gc.freeze`) what the server loaded.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, server: ServerLimits) -> None:
        self.app = app
        self._max_bytes = limits.max_request_bytes
        self._max_values = limits.max_request_values
        self._min_rate = limits.min_body_rate
        self._max_total_bytes = server.max_total_request_bytes
        half = max(self._max_total_bytes // 2, self._max_bytes)
        self._max_client_bytes = server.max_client_request_bytes or half
        self._total_bytes = self._uncollected_bytes = 0
        self._client_bytes: Counter[bytes | str] = Counter()
        self._too_large = (
            f"the body has more than {self._max_bytes} bytes, which is the limit ({flag('max_request_bytes')})"
        )
        self._no_room = (
            f"the bodies of all requests would have more than {self._max_total_bytes} bytes "
            f"({flag('max_total_request_bytes')}); try again later"
        )
        self._no_share = (
            f"the bodies of your requests would have more than {self._max_client_bytes} bytes "
            f"({flag('max_client_request_bytes')}); send fewer at once"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = scope[SCOPE_KEY].client
        with self._counting(client) as count:
            receive = self._counted(SlowBodyGuard(receive, self._min_rate), count)
            try:
                self._check_headers(headers, client)
                if _is_json(headers) or (scope["method"] in _WITH_BODY and "content-type" not in headers):
                    receive = await self._read_json(scope, receive, count)
            except ClientDisconnect:
                return
            except HTTPException as refusal:
                await _refuse(refusal, scope, receive, send)
                return
            await self.app(scope, receive, send)

    def _check_headers(self, headers: Headers, client: bytes | str) -> None:
        length = headers.get("content-length", "")
        num_bytes = int(length[:20]) if length.isdecimal() else 0
        if num_bytes > self._max_bytes:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
        self._check_room(client, num_bytes)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"a body with Content-Encoding {encoding[:_MAX_NAME]} is not read; send it as it is",
                {"Accept-Encoding": "identity"},
            )

    async def _read_json(self, scope: Scope, receive: Receive, count: Count) -> Receive:
        body = await Request(scope, receive).body()
        if body and not _is_json(Headers(scope=scope)):
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body has no type; send 'Content-Type: application/json'"
            )
        if body:  # Of an empty one the endpoint names the fields.
            read = await self._decoded(body)
            if read.is_large:
                count(read.num_values * VALUE_BYTES)
            scope[SCOPE_KEY].json = read
        return _replayed(body, receive)

    async def _decoded(self, body: bytes) -> JsonBody:
        try:
            if len(body) < LARGE_BYTES:
                return decode(body, self._max_values)
            return await asyncio.to_thread(decode, body, self._max_values)
        except TooManyValuesError as error:
            message = f"the JSON body {error}, which is the limit ({flag('max_request_values')})"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message) from None
        except InvalidJsonError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"the JSON body {error}") from None

    @contextmanager
    def _counting(self, client: bytes | str) -> Iterator[Count]:
        """A function that counts bytes until the end of this block. It raises if there is no room for them."""
        num_bytes = 0

        def count(added: int) -> None:
            nonlocal num_bytes
            self._check_room(client, added)
            num_bytes += added
            self._total_bytes += added
            self._uncollected_bytes += added
            self._client_bytes[client] += added

        try:
            yield count
        finally:
            self._total_bytes -= num_bytes
            self._client_bytes[client] -= num_bytes
            if not self._client_bytes[client]:
                del self._client_bytes[client]
            if self._uncollected_bytes >= COLLECT_AFTER_BYTES:
                self._uncollected_bytes = 0
                gc.collect()

    def _counted(self, receive: Receive, count: Count) -> Receive:
        """A `receive` that raises as soon as the body is too large; the framework makes the answer of the exception."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            added = len(message.get("body", b""))
            num_bytes += added
            if num_bytes > self._max_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            count(added)
            return message

        return counted

    def _check_room(self, client: bytes | str, added: int) -> None:
        """
        Raises:
            HTTPException: There is no room for so many bytes more.
        """
        if self._total_bytes + added > self._max_total_bytes:
            raise _try_later(self._no_room)
        if client and self._client_bytes[client] + added > self._max_client_bytes:
            raise _try_later(self._no_share)


class SlowBodyGuard:
    """A `receive` that raises when a body comes more slowly than `min_rate` bytes a second for `BODY_TIMEOUT_S`.

    Only the time counts in which the application waits for the client.
    """

    def __init__(self, receive: Receive, min_rate: int) -> None:
        self._receive = receive
        self._min_rate = min_rate
        self._left_s = BODY_TIMEOUT_S
        self._is_complete = False

    async def __call__(self) -> Message:
        """
        Raises:
            HTTPException: The body is too slow.
        """
        if self._is_complete:  # It waits for a disconnect.
            return await self._receive()
        start = time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), self._left_s)
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body came more slowly than {self._min_rate} bytes a second for {BODY_TIMEOUT_S:g} s; send it "
                f"faster, or lower {flag('min_body_rate')}",
                {"Connection": "close"},
            ) from None
        gained_s = len(message.get("body", b"")) / self._min_rate
        self._left_s = min(self._left_s - (time.monotonic() - start) + gained_s, BODY_TIMEOUT_S)
        self._is_complete = not message.get("more_body", False)
        return message


def _try_later(message: str) -> HTTPException:
    return HTTPException(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": str(_BODY_RETRY_S)})


async def _refuse(refusal: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(refusal.headers or {})
    await error_response(refusal.detail, HTTPStatus(refusal.status_code), headers)(scope, receive, send)


def _is_json(headers: Headers) -> bool:
    subtype = headers.get("content-type", "").partition(";")[0].strip().lower()
    return subtype == "application/json" or subtype.endswith("+json")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body that was read, and then the further messages: a disconnect."""
    is_replayed = False

    async def replay() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


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
