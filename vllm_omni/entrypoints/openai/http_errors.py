# SPDX-License-Identifier: Apache-2.0
"""The answer to a request that failed: status, vLLM's error body, and when to retry.

Knows the errors of the pipeline and of the web framework; no endpoint.
"""

import logging
import math
from http import HTTPStatus
from typing import Any, cast

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import GracefulHTTPError

from vllm_omni.errors import (
    InvalidRequestError,
    OmniError,
    PipelineClosedError,
    PipelineFullError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    StageCrashError,
    StageDeadError,
    StageExecutionError,
)

logger = logging.getLogger("vllm.omni.server")

_STATUS: dict[type[OmniError], HTTPStatus] = {
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    PipelineFullError: HTTPStatus.TOO_MANY_REQUESTS,
    RequestTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
    StageDeadError: HTTPStatus.SERVICE_UNAVAILABLE,
    PipelineClosedError: HTTPStatus.SERVICE_UNAVAILABLE,
    RequestAbortedError: HTTPStatus.SERVICE_UNAVAILABLE,
}


_COMMON = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)  # fmt: skip


class OmniHTTPError(GracefulHTTPError):
    """A failed request as an HTTP answer. vLLM's handlers and streams read it, too.

    Attributes:
        retry_after_s: Seconds after which a client may retry; None if a retry does not help.
        is_final: Sending the request again does harm; OpenAI's clients would otherwise, after any internal error.
    """

    def __init__(
        self, message: str, http_status: HTTPStatus, retry_after_s: float | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message, http_status)
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    @property
    def headers(self) -> dict[str, str]:
        if self.is_final:
            return {"x-should-retry": "false"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def to_http_error(error: OmniError) -> OmniHTTPError:
    """An error of the pipeline as an answer. The causes of internal errors go to the log, not to the client."""
    status = next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return OmniHTTPError(_log_failure(error), status, is_final=isinstance(error, StageCrashError))
    if isinstance(error, PipelineFullError):
        return OmniHTTPError(str(error), status, error.retry_after_s)
    if isinstance(error, StageDeadError):
        text = "the stage that held the request failed and restarts; send the request again"
        return OmniHTTPError(text, status, error.retry_after_s)
    return OmniHTTPError(str(error), status)


def _log_failure(error: OmniError) -> str:
    """Logs an internal error; returns the message for the client."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
        return "internal error; see the server's log"
    where = "" if error.stage_id is None else f" in stage {error.stage_id}"
    logger.error("request %s failed%s: %s\n%s", error.request_id, where, error, error.stage_traceback)
    kind = "failed" if isinstance(error, StageExecutionError) else "ended with an internal error"
    return f"request {error.request_id} {kind}{where}; see the server's log"


def error_response(message: str, status: HTTPStatus, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in vLLM's form, for middleware, where no handler is called."""
    info = ErrorInfo(message=message, type=status.phrase, code=status.value)
    return JSONResponse(ErrorResponse(error=info).model_dump(), status.value, headers)


def describe_errors(*others: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """The errors of an endpoint in the API's description: those that every model request can get, and others."""
    return {status.value: {"model": ErrorResponse} for status in sorted({*_COMMON, *others})}


def register_error_handlers(app: FastAPI) -> None:
    """Call it after vLLM's own handlers were set: it replaces some of them."""
    handlers: dict[type[Exception], Any] = {
        OmniError: _on_error,
        OmniHTTPError: _on_error,
        HTTPException: _on_framework_error,
        fastapi.HTTPException: _on_framework_error,
        RecursionError: _on_recursion_error,
        Exception: on_unknown_error,
    }
    for error_type, handler in handlers.items():
        app.add_exception_handler(error_type, handler)


async def _on_error(request: Request, error: OmniError | OmniHTTPError) -> JSONResponse:
    error = to_http_error(error) if isinstance(error, OmniError) else error
    return error_response(sanitize_message(error.message), error.http_status, error.headers)


async def _on_framework_error(request: Request, error: HTTPException) -> JSONResponse:
    """vLLM's answer, also to an unknown path or method, with the framework's headers."""
    response = await http_exception_handler(request, cast(fastapi.HTTPException, error))
    response.headers.update(error.headers or {})
    return response


async def _on_recursion_error(request: Request, error: RecursionError) -> JSONResponse:
    """Only readers and writers of nested data recurse, and only clients send data that is nested so deeply."""
    logger.warning("a request was refused: nested too deeply", exc_info=error)
    return error_response("the request is nested too deeply", HTTPStatus.BAD_REQUEST)


async def on_unknown_error(request: Request, error: Exception) -> JSONResponse:
    """The framework raises the error again after the answer, and the web server logs it."""
    return error_response("internal error; see the server's log", HTTPStatus.INTERNAL_SERVER_ERROR)
