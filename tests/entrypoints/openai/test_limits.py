# SPDX-License-Identifier: Apache-2.0
"""How much one request may make the server read."""

import argparse

import pytest

from tests.entrypoints.openai.small_apps import ask, make_app, pieces
from vllm_omni.entrypoints.openai.limits import RequestLimits, add_limit_arguments, limits_from

JSON = {"content-type": "application/json"}


def parse(*flags: str) -> RequestLimits:
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser.add_argument_group("limits"))
    return limits_from(parser.parse_args(flags))


def test_every_limit_has_a_flag() -> None:
    assert parse() == RequestLimits()
    assert parse("--max-request-bytes", "10", "--max-video-seconds", "0.5") == RequestLimits(
        max_request_bytes=10, max_video_seconds=0.5
    )


@pytest.mark.parametrize(
    "flags", [("--max-request-bytes", "0"), ("--max-video-seconds", "inf"), ("--max-media-parts", "x")]
)
def test_a_limit_that_lets_nothing_or_everything_through_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    app = make_app(max_request_bytes=100)

    async def never() -> None:
        raise AssertionError("the body was read")
        yield b""

    for content_type in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
        headers = {"content-type": content_type, "content-length": "101"}
        response = ask(app, "POST", "/v1/echo", content=never(), headers=headers)
        assert response.status_code == 413
        assert "--max-request-bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/echo", "/v1/form"])
@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
def test_a_body_that_turns_out_too_large_is_read_no_further(path: str, content_type: str) -> None:
    given = []

    async def chunks():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(100):
            given.append(b"{" * 50)
            yield given[-1]

    response = ask(
        make_app(max_request_bytes=120), "POST", path, content=chunks(), headers={"content-type": content_type}
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413
    assert len(given) <= 4


def test_a_body_as_large_as_it_may_be_comes_through_whole() -> None:
    body = b'{"text": "' + b"x" * 88 + b'"}'
    assert len(body) == 100
    app = make_app(max_request_bytes=100)
    assert ask(app, "POST", "/v1/echo", content=body, headers=JSON).json()["text"] == "x" * 88
    assert ask(app, "POST", "/v1/echo", content=pieces(body[:7], body[7:]), headers=JSON).json()["text"] == "x" * 88


def test_a_file_within_the_limit_comes_through_whole() -> None:
    response = ask(make_app(), "POST", "/v1/form", files={"file": b"x" * 3_000_000}, data={"text": "a"})
    assert response.json() == {"bytes": 3_000_000}
