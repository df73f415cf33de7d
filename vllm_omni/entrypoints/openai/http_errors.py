# SPDX-License-Identifier: Apache-2.0
"""The answer to a request that failed: status, vLLM's error body, and when to retry.

Knows the errors of the pipeline and of the web framework; no endpoint.
"""

import errno
import logging
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import fastapi
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.protocol import AnthropicError, AnthropicErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError

from vllm_omni.errors import (
    ControlError,
    InvalidControlError,
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
from vllm_omni.vllm_protocol import ErrorInfo, ErrorResponse

logger = logging.getLogger("vllm.omni.server")

_FIELD = re.compile(r"[a-z_][a-z0-9_-]*")  # or a header
# Pydantic's names of alternatives that look like fields.
_TYPES = {"str", "int", "float", "bool", "bytes", "none", "dict", "list", "tuple"}

_STATUS: dict[type[OmniError], HTTPStatus] = {
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    InvalidControlError: HTTPStatus.BAD_REQUEST,
    PipelineFullError: HTTPStatus.TOO_MANY_REQUESTS,
    RequestTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
    StageDeadError: HTTPStatus.SERVICE_UNAVAILABLE,
    PipelineClosedError: HTTPStatus.SERVICE_UNAVAILABLE,
    RequestAbortedError: HTTPStatus.SERVICE_UNAVAILABLE,
}
_MAX_MESSAGE, _MAX_NAME = 4000, 100  # characters
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

MESSAGES_PATH = "/v1/messages"
"""Of Anthropic's API, and of its further paths."""

_MESSAGES_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error", HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error", HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}  # fmt: skip
"""Anthropic's `type` of an error."""

_CLOSED_RETRY_S = 1.0
"""Of a server that shuts down: another one, or the next one at its address, may take the request."""


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


def to_http_error(error: OmniError | OmniHTTPError) -> OmniHTTPError:
    """An error of the pipeline as an answer. The causes of internal errors go to the log, not to the client."""
    if isinstance(error, OmniHTTPError):
        return error
    status = next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)
    if isinstance(error, ControlError):  # The operator reads it.
        return OmniHTTPError(str(error), status)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return OmniHTTPError(_log_failure(error), status, is_final=isinstance(error, StageCrashError))
    if isinstance(error, PipelineFullError):
        return OmniHTTPError(str(error), status, error.retry_after_s)
    if isinstance(error, StageDeadError):
        text = "the stage that held the request failed and restarts; send the request again"
        return OmniHTTPError(text, status, error.retry_after_s)
    is_closed = isinstance(error, PipelineClosedError | RequestAbortedError)
    return OmniHTTPError(str(error), status, _CLOSED_RETRY_S if is_closed else None)


def _log_failure(error: OmniError) -> str:
    """Logs an internal error; returns the message for the client."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
        return "internal error; see the server's log"
    where = "" if error.stage_id is None else f" in stage {error.stage_id}"
    logger.error("request %s failed%s: %s\n%s", error.request_id, where, error, error.stage_traceback)
    kind = "failed" if isinstance(error, StageExecutionError) else "ended with an internal error"
    return f"request {error.request_id} {kind}{where}; see the server's log"


def error_body(error: OmniHTTPError | VLLMClientError) -> ErrorResponse:
    """An error in vLLM's form, as in answers; for streams and batches, whose status is another."""
    body = create_error_response(error)
    if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError):
        body.error.message = sanitize_message(_clip(str(error.args[0])))  # vLLM appends the parameter and the value.
    body.error.message, body.error.type = _clip(body.error.message), _type_of(HTTPStatus(body.error.code))
    return body


def returned_error(
    message: str | Exception,
    err_type: str = "BadRequestError",
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> ErrorResponse:
    """An error that a handler of vLLM's returns, or writes into a stream, in the style of those that it raises. Takes
    the arguments of vLLM's function, which it replaces."""
    if isinstance(message, OmniHTTPError | VLLMClientError):
        return error_body(message)
    return create_error_response(message, err_type, status_code, param)


def error_response(message: str, status: HTTPStatus, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer with an error in vLLM's form."""
    return JSONResponse(_error(message, status).model_dump(), status.value, headers)


def _error(message: str, status: HTTPStatus, parameter: str | None = None) -> ErrorResponse:
    info = ErrorInfo(
        message=sanitize_message(_clip(message)), type=_type_of(status), code=status.value, param=parameter
    )
    return ErrorResponse(error=info)


def respond(request: Request, body: ErrorResponse, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer with an error, in the form of the API that was called: Anthropic's or OpenAI's."""
    content: BaseModel = body
    if request.scope["path"].startswith(f"{request.scope.get('root_path', '')}{MESSAGES_PATH}"):
        kind = _MESSAGES_TYPES.get(HTTPStatus(body.error.code), "api_error")
        content = AnthropicErrorResponse(error=AnthropicError(type=kind, message=body.error.message))
    return JSONResponse(content.model_dump(), body.error.code, headers)


def _type_of(status: HTTPStatus) -> str:
    """vLLM's `type` of an error: `BadRequestError`, `NotFoundError`."""
    return status.phrase.replace(" ", "").replace("-", "").removesuffix("Error") + "Error"


def _clip(text: str, limit: int = _MAX_MESSAGE) -> str:
    """Errors quote what was sent, which may be long."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def describe_errors(*others: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """The errors of an endpoint in the API's description: those that every model request can get, and others."""
    return {status.value: {"model": ErrorResponse} for status in sorted({*_COMMON, *others})}


FORM_ERRORS = describe_errors(
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
"""The errors of endpoints that take forms."""


def register_error_handlers(app: FastAPI) -> None:
    """Call it after vLLM's own handlers were set: it replaces some of them."""
    handlers: dict[type[Exception], Any] = {
        OmniError: _on_error,
        OmniHTTPError: _on_error,
        HTTPException: _on_framework_error,
        fastapi.HTTPException: _on_framework_error,
        RequestValidationError: _on_wrong_fields,
        VLLMClientError: _on_client_error,
        OSError: _on_system_error,
        RecursionError: _on_recursion_error,
        Exception: on_unknown_error,
    }
    for error_type, handler in handlers.items():
        app.add_exception_handler(error_type, handler)


async def _on_error(request: Request, error: OmniError | OmniHTTPError) -> JSONResponse:
    error = to_http_error(error)
    return respond(request, _error(error.message, error.http_status), error.headers)


async def _on_client_error(request: Request, error: VLLMClientError) -> JSONResponse:
    _log_stack(request, error)
    return respond(request, error_body(error))


async def _on_framework_error(request: Request, error: HTTPException) -> JSONResponse:
    """Answers errors of the framework, an unknown path or method among them, with its headers."""
    _log_stack(request, error)
    return respond(request, _error(error.detail, HTTPStatus(error.status_code)), error.headers)


def _log_stack(request: Request, error: Exception) -> None:
    """Logs the stack if `--log-error-stack` asks for it, as vLLM's handlers do."""
    if request.app.state.args.log_error_stack:
        logger.error("a request was refused", exc_info=error)


async def _on_wrong_fields(request: Request, error: RequestValidationError) -> JSONResponse:
    _log_stack(request, error)
    message, parameter = describe_wrong_fields(error.errors())
    return respond(request, _error(message, HTTPStatus.BAD_REQUEST, parameter))


async def _on_system_error(request: Request, error: OSError) -> JSONResponse:
    if error.errno not in _NO_ROOM:
        raise error
    logger.error("a request failed: no room for its files", exc_info=error)
    message = (
        f"the server has no room for the files of this request; make some in {tempfile.gettempdir()}, or set TMPDIR to "
        "another folder"
    )
    return respond(request, _error(message, HTTPStatus.INSUFFICIENT_STORAGE))


def describe_wrong_fields(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One sentence about the first wrong field of a body, and the field.

    Args:
        errors: Those of pydantic; of a union those of each alternative.

    Returns:
        The sentence; and the field, as in `messages[0].content`, or None if it is the body itself.
    """
    paths = [_path_of(found) for found in errors]
    # What was given is most like the alternative that was read furthest.
    same_field = [path for path in paths if path[:1] == paths[0][:1]]
    path = max(same_field, key=len)
    reasons = dict.fromkeys(_reason(found) for found, at in zip(errors, paths, strict=True) if at == path)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{_clip(part, _MAX_NAME)}" for part in path)
    field = field.removeprefix(".")
    place = next(iter(errors[0]["loc"]), "body")  # or query, path, header
    return f"{field or f'the {place}'} {', or '.join(reasons)}", field or None


def _path_of(found: Mapping[str, Any]) -> tuple[str | int, ...]:
    """The names and indexes on the way to a wrong field, without pydantic's names of types."""
    path = found["loc"][1:]
    if found["type"] == "json_invalid" or not path:
        return ()
    names = [part for part in path[:-1] if _is_name(part)]
    return (*names, path[-1]) if found["type"] == "extra_forbidden" or _is_name(path[-1]) else tuple(names)


def _is_name(part: str | int) -> bool:
    return isinstance(part, int) or (part not in _TYPES and _FIELD.fullmatch(part) is not None)


def _reason(found: Mapping[str, Any]) -> str:
    match found["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not a field of this request; remove it"
        case "json_invalid":
            return f"is not JSON: {found.get('ctx', {}).get('error', found['msg'])}"
        case "value_error":
            return f"is wrong: {found.get('ctx', {}).get('error', found['msg'])}"
    message = found["msg"]
    for before, after in (("Input should", "must"), ("should", "must")):
        _, is_there, rest = message.partition(f"{before} ")
        if is_there:
            return f"{after} {rest}"
    return f"is wrong: {message}"


async def _on_recursion_error(request: Request, error: RecursionError) -> JSONResponse:
    """Only readers and writers of nested data recurse, and only clients send data that is nested so deeply."""
    logger.warning("a request was refused: nested too deeply", exc_info=error)
    return respond(request, _error("the request is nested too deeply", HTTPStatus.BAD_REQUEST))


async def on_unknown_error(request: Request, error: Exception) -> JSONResponse:
    """The framework raises the error again after the answer, and the web server logs it."""
    return respond(request, _error("internal error; see the server's log", HTTPStatus.INTERNAL_SERVER_ERROR))
