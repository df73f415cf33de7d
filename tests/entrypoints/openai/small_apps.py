# SPDX-License-Identifier: Apache-2.0
"""A small application with our middleware and error handlers, for tests that need no pipeline; and its clients."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from fastapi import FastAPI, Form, UploadFile
from pydantic import BaseModel
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from vllm_omni.entrypoints.openai.http_errors import register_error_handlers
from vllm_omni.entrypoints.openai.middleware import add_middleware, bound_json_routes

DEFAULTS = {
    "api_key": None,
    "log_error_stack": False,
    "playground": False,
    "public_lists": False,
    "resumable_streams": False,
}


class Question(BaseModel):
    text: str
    number: float = 0.0
    parts: list[dict[str, int]] = []
    extra: Any = None


def make_app(fail: Callable[[], None] = lambda: None, **args: Any) -> FastAPI:
    """`fail` is called by every request to `/v1/fail`; `args` are flags of the server."""
    app = FastAPI()
    app.state.args = argparse.Namespace(**{**DEFAULTS, **args})
    init_exception_handler(app)
    register_error_handlers(app)
    add_middleware(app, app.state.args)

    @app.post("/v1/echo")
    async def echo(question: Question) -> dict[str, Any]:
        return {"text": question.text, "number": question.number}

    @app.post("/v1/form")
    async def form(file: UploadFile, text: str = Form()) -> dict[str, int]:
        return {"bytes": len(await file.read())}

    @app.get("/v1/fail")
    async def failing() -> None:
        fail()

    bound_json_routes(app)
    for path in ("/health", "/ping", "/metrics", "/tokenize", "/secret"):
        app.add_api_route(path, lambda: "here", methods=["GET"])
    return app


def send(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request. An internal error is an answer here, too."""

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **request)

    return asyncio.run(main())


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for chunk in chunks:
        yield chunk
