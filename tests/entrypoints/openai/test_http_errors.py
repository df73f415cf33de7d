# SPDX-License-Identifier: Apache-2.0
"""The answers to requests that fail."""

import json
import logging
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, NoReturn

import pytest
from fastapi import Depends, FastAPI, HTTPException
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from tests.entrypoints.openai.small_apps import make_app, send
from tests.small_file_system import small_file_system
from vllm_omni.entrypoints.openai.chat import OmniServingChat, OmniServingCompletion
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.media_request import RequestModel, SoundUrl
from vllm_omni.errors import (
    InvalidRequestError,
    PipelineClosedError,
    PipelineFullError,
    RequestAbortedError,
    RequestTimeoutError,
    StageCrashError,
    StageDeadError,
    StageExecutionError,
)

JSON = {"content-type": "application/json"}


def failing_with(error: Exception) -> FastAPI:
    def fail() -> NoReturn:
        raise error

    return make_app(fail)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("no such voice", "r"), 400),
        (PipelineFullError("the pipeline is full", 2.2), 429),
        (RequestTimeoutError("took longer than 5 s", "r"), 504),
        (StageDeadError("stage 1 died", "r", 1), 503),
        (PipelineClosedError("closed"), 503),
        (RequestAbortedError("aborted", "r"), 503),
        (StageExecutionError("boom", "r", 1), 500),
        (StageCrashError("died twice", "r", 1), 500),
    ],
)
def test_every_error_of_a_pipeline_has_its_status(error: Exception, status: int) -> None:
    response = send(failing_with(error), "GET", "/v1/fail")
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.2, "3"), (60.0, "60")])
def test_a_full_pipeline_answers_with_a_retry_time(seconds: float, header: str) -> None:
    response = send(failing_with(PipelineFullError("full", seconds)), "GET", "/v1/fail")
    assert response.headers["retry-after"] == header


def test_what_another_try_may_help_has_a_retry_time() -> None:
    for closed in (PipelineClosedError("closed"), RequestAbortedError("aborted", "r")):
        assert send(failing_with(closed), "GET", "/v1/fail").headers["retry-after"] == "1"
    assert "retry-after" in send(failing_with(StageDeadError("died", "r", 1)), "GET", "/v1/fail").headers
    assert send(failing_with(StageDeadError("dead", "r", 1, 30.0)), "GET", "/v1/fail").headers["retry-after"] == "30"
    never = StageDeadError("dead", "r", 1, None)
    for error in (InvalidRequestError("wrong", "r"), StageCrashError("died twice", "r", 1), never):
        assert "retry-after" not in send(failing_with(error), "GET", "/v1/fail").headers


def test_openai_s_client_does_not_send_a_request_again_that_kills_its_stage() -> None:
    for error, header in (
        (StageCrashError("died twice", "r", 1), "false"),
        (StageExecutionError("boom", "r", 1), None),
    ):
        assert send(failing_with(error), "GET", "/v1/fail").headers.get("x-should-retry") == header


def test_internal_errors_are_only_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = StageExecutionError("cannot read /etc/server/secret.key", "r7", 1)
    error.stage_traceback = "Traceback: line 17"
    with caplog.at_level(logging.ERROR, "vllm.omni.server"):
        message = send(failing_with(error), "GET", "/v1/fail").json()["error"]["message"]
    assert "secret" not in message and "line 17" not in message
    assert "r7" in message and "stage 1" in message
    assert "secret.key" in caplog.text and "line 17" in caplog.text


def test_an_unexpected_error_has_no_details_for_the_client() -> None:
    response = send(failing_with(KeyError("DATABASE_PASSWORD")), "GET", "/v1/fail")
    assert response.status_code == 500
    assert "PASSWORD" not in response.text


def test_vllms_streams_have_the_status() -> None:
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    info = create_error_response(to_http_error(PipelineFullError("full", 1.0))).error
    assert (info.code, info.message) == (429, "full")


def test_errors_have_one_style() -> None:
    app = make_app()
    wrong = [
        (send(app, "POST", "/v1/echo", json={"text": 5}), "BadRequestError", "text"),
        (send(app, "POST", "/v1/echo", json={"text": "a", "parts": [{"x": "y"}]}), "BadRequestError", "parts[0].x"),
        (send(app, "POST", "/v1/echo", content=b"[]", headers=JSON), "BadRequestError", None),
        (send(failing_with(VLLMValidationError("no", parameter="a[0]")), "GET", "/v1/fail"), "BadRequestError", "a[0]"),
        (send(failing_with(VLLMNotFoundError("no")), "GET", "/v1/fail"), "NotFoundError", None),
        (send(failing_with(PipelineFullError("full", 1.0)), "GET", "/v1/fail"), "TooManyRequestsError", None),
        (send(failing_with(StageExecutionError("boom", "r", 1)), "GET", "/v1/fail"), "InternalServerError", None),
        (send(failing_with(KeyError("a")), "GET", "/v1/fail"), "InternalServerError", None),
        (send(make_app(api_key=["a"]), "GET", "/v1/fail"), "UnauthorizedError", None),
        (send(app, "GET", "/v1/nothing"), "NotFoundError", None),
    ]
    for answer, kind, parameter in wrong:
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (kind, parameter, answer.status_code), error
        assert "parameter=" not in error["message"]


def test_errors_that_vllms_handlers_return_have_that_style() -> None:
    """In streams, too."""
    error = VLLMValidationError("no", parameter="a[0]", value="x" * 9999)
    assert OmniServingChat.create_error_response(error).error.model_dump() == {
        "message": "no", "type": "BadRequestError", "param": "a[0]", "code": 400,
    }  # fmt: skip
    for handler in (OmniServingChat, OmniServingCompletion):
        line = json.loads(handler.create_streaming_error_response(handler, error))  # type: ignore[arg-type]
        assert (line["error"]["message"], line["error"]["param"]) == ("no", "a[0]")
    full = OmniServingChat.create_error_response(to_http_error(PipelineFullError("full", 1.0))).error
    assert (full.type, full.code) == ("TooManyRequestsError", 429)
    other = OmniServingChat.create_error_response("no model", "NotFoundError", HTTPStatus.NOT_FOUND, "model").error
    assert (other.message, other.type, other.param, other.code) == ("no model", "NotFoundError", "model", 404)


def test_an_error_is_short_however_long_what_it_quotes() -> None:
    name = "x" * 1_000_000
    for body in ({"text": "a", "parts": [{"x": "y", name: 5}]}, {"text": "a", "number": name}):
        assert len(send(make_app(), "POST", "/v1/echo", json=body).content) < 5000
    for error in (VLLMValidationError(name, parameter="a", value=name), InvalidRequestError(name, "r")):
        assert len(send(failing_with(error), "GET", "/v1/fail").content) < 5000


def test_a_full_folder_for_uploads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Upload(RequestModel):
        file_field = "file"
        file: SoundUrl

    async def upload(request: Annotated[Upload, Depends(Upload.read)]) -> int:
        return len(request.file)

    app = make_app()
    app.add_api_route("/v1/upload", upload, methods=["POST"])
    with small_file_system(1 << 20) as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        full = send(app, "POST", "/v1/upload", files={"file": b"x" * (3 << 20)})
        assert full.status_code == 507 and "TMPDIR" in full.json()["error"]["message"], full.text
        assert send(app, "POST", "/v1/upload", files={"file": b"x" * 1000}).status_code == 200
    assert send(failing_with(PermissionError("/root")), "GET", "/v1/fail").status_code == 500


def test_errors_of_the_framework_have_the_same_form() -> None:
    missing, wrong_method = send(make_app(), "GET", "/v1/nothing"), send(make_app(), "GET", "/v1/echo")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    response = send(failing_with(HTTPException(401, "who?", {"WWW-Authenticate": "Bearer"})), "GET", "/v1/fail")
    assert (response.json()["error"]["message"], response.headers["www-authenticate"]) == ("who?", "Bearer")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"hello", "not JSON"),
        (b'{"text": "a", "number": NaN}', "not JSON"),
        (b'{"text": "a", "number": -Infinity}', "not JSON"),
        (b'{"text": "a", "number": 1e999}', "not JSON"),
        (b'{"text": "a", "number": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"text": "\\ud800"}', "not JSON"),
        (b'{"text": "\xff"}', "UTF-8"),
        ('{"text": "ä"}'.encode("latin-1"), "UTF-8"),
        ('{"text": "a"}'.encode("utf-16"), "not JSON"),
        (b'{"text": "a", "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"text": 5}', "text"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"", "body"),
    ],
)
def test_a_body_with_wrong_fields_is_a_client_error(body: bytes, words: str) -> None:
    response = send(make_app(), "POST", "/v1/echo", content=body, headers=JSON)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"] + str(response.json()["error"]["param"])


def test_all_valid_json_is_accepted() -> None:
    for text in ("ä 😀 \u0000 \u2028", "x" * (2 << 20)):
        response = send(make_app(), "POST", "/v1/echo", json={"text": text, "number": -1.5e300})
        assert response.json() == {"text": text, "number": -1.5e300}


def test_a_body_of_an_unknown_form_is_refused() -> None:
    body = b'{"text": "a"}'
    for headers, words in (
        ({}, "Content-Type: application/json"),
        ({"content-type": "text/plain"}, "application/json, not text/plain"),
        (JSON | {"content-encoding": "gzip"}, "Content-Encoding gzip"),
    ):
        refused = send(make_app(), "POST", "/v1/echo", content=body, headers=headers)
        assert refused.status_code == 415 and words in refused.json()["error"]["message"], refused.text
    assert refused.headers["accept-encoding"] == "identity"
    plain = send(make_app(), "POST", "/v1/echo", content=body, headers=JSON | {"content-encoding": "identity"})
    assert plain.json()["text"] == "a"
    assert send(make_app(), "POST", "/v1/echo").json()["error"]["message"] == "the body is missing"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x"),
        (b"no boundary at all", "multipart/form-data; boundary=x"),
        (b"", "multipart/form-data"),
        (b"--x--", "multipart/form-data; boundary="),
        (
            b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n\xff\xfe\r\n--x--',
            "multipart/form-data; boundary=x",
        ),
        (b"{}", "application/json"),
    ],
)
def test_a_broken_form_is_a_client_error(body: bytes, content_type: str) -> None:
    response = send(make_app(), "POST", "/v1/form", content=body, headers={"content-type": content_type})
    assert response.status_code in (400, 422), response.text
    assert response.json()["error"]["message"]


def test_too_deep_nesting_is_a_client_error_when_it_is_written() -> None:
    def recurse() -> None:
        recurse()

    response = send(make_app(recurse), "GET", "/v1/fail")
    assert response.status_code == 400
