# SPDX-License-Identifier: Apache-2.0
"""Limits of the bodies of one request and of all."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.clock import Clock
from tests.entrypoints.openai.small_apps import make_app, pieces, send
from vllm_omni.entrypoints.openai import middleware
from vllm_omni.entrypoints.openai.server_args import (
    RequestLimits,
    ServerLimits,
    add_limit_arguments,
    check_limits,
    limits_from,
)

JSON = {"content-type": "application/json"}


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser.add_argument_group("limits"))
    return parser.parse_args(flags)


def test_every_limit_has_a_flag(tmp_path: Path) -> None:
    assert limits_from(parse(), RequestLimits) == RequestLimits()
    assert limits_from(parse(), ServerLimits) == ServerLimits()
    flags = parse("--max-request-bytes", "10", "--max-video-seconds", "0.5", "--video-dir", str(tmp_path))
    assert limits_from(flags, RequestLimits) == RequestLimits(max_request_bytes=10, max_video_seconds=0.5)
    assert limits_from(flags, ServerLimits) == ServerLimits(video_dir=str(tmp_path))


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-request-bytes", "0"),
        ("--max-video-seconds", "inf"),
        ("--max-media-parts", "x"),
        ("--max-stored-videos", "0"),
        ("--video-expires-after-s", "-1"),
        ("--video-dir", "/no/such/directory"),
        ("--video-dir", __file__),
    ],
)
def test_an_invalid_limit_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)


@pytest.mark.parametrize("flag", ["--max-total-request-bytes", "--max-client-request-bytes"])
def test_limits_that_contradict_each_other_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} 9 .* --max-request-bytes 10"):
        check_limits(parse("--max-request-bytes", "10", flag, "9"))
    with pytest.raises(ValueError, match=r"--max-total-decoded-bytes 9 .* --max-decoded-bytes 10"):
        check_limits(parse("--max-decoded-bytes", "10", "--max-total-decoded-bytes", "9"))


def test_a_body_with_too_large_a_content_length_is_not_read() -> None:
    app = make_app(max_request_bytes=100)

    async def never() -> None:
        raise AssertionError("the body was read")
        yield b""

    for content_type in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
        headers = {"content-type": content_type, "content-length": "101"}
        response = send(app, "POST", "/v1/echo", content=never(), headers=headers)
        assert response.status_code == 413
        assert "--max-request-bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/echo", "/v1/form"])
@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
def test_a_body_is_read_only_up_to_the_limit(path: str, content_type: str) -> None:
    given = []

    async def chunks():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(100):
            given.append(b"{" * 50)
            yield given[-1]

    response = send(
        make_app(max_request_bytes=120), "POST", path, content=chunks(), headers={"content-type": content_type}
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413
    assert len(given) <= 4


def test_a_body_at_the_limit_is_read_whole() -> None:
    body = b'{"text": "' + b"x" * 88 + b'"}'
    assert len(body) == 100
    app = make_app(max_request_bytes=100)
    assert send(app, "POST", "/v1/echo", content=body, headers=JSON).json()["text"] == "x" * 88
    assert send(app, "POST", "/v1/echo", content=pieces(body[:7], body[7:]), headers=JSON).json()["text"] == "x" * 88


def test_a_file_within_the_limit_is_read_whole() -> None:
    response = send(make_app(), "POST", "/v1/form", files={"file": b"x" * 3_000_000}, data={"text": "a"})
    assert response.json() == {"bytes": 3_000_000}


class Room:
    """An application whose answers to `/v1/hold` end when `let` is set, and a client of it."""

    def __init__(self, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.app, self.client = app, client
        self.let = asyncio.Event()
        self.arrived = asyncio.Event()

        @app.post("/v1/hold")
        async def hold(request: Request) -> StreamingResponse:
            assert await request.body()
            return StreamingResponse(self._answer())

    async def _answer(self):
        yield b"a"
        self.arrived.set()
        await self.let.wait()
        yield b"b"

    async def hold(self, body: bytes, **headers: str) -> "asyncio.Task[httpx.Response]":
        """A request that is being answered."""
        headers = {"content-type": "application/octet-stream", **headers}
        task = asyncio.create_task(self.client.post("/v1/hold", content=body, headers=headers))
        await self.arrived.wait()
        return task


def in_room(main: Callable[[Room], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        app = make_app(**limits)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            await main(Room(app, client))

    asyncio.run(run())


@pytest.mark.parametrize("length_is_known", [True, False])
@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/v1/echo", "application/json"),
        ("/v1/form", "multipart/form-data; boundary=x"),
        ("/v1/form", "application/x-www-form-urlencoded"),
    ],
)
def test_the_bodies_of_all_requests_are_limited(path: str, content_type: str, length_is_known: bool) -> None:
    async def main(room: Room) -> None:
        first = await room.hold(b"x" * 80)
        body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        refused = await room.client.post(
            path, content=body if length_is_known else pieces(body), headers={"content-type": content_type}
        )
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "--max-total-request-bytes" in refused.json()["error"]["message"]
        small = await room.client.post("/v1/echo", content=b'{"text": "a"}', headers=JSON)
        assert small.status_code == 200

        room.let.set()
        assert (await first).content == b"ab"
        again = await room.client.post("/v1/echo", content=b'{"text": "' + b"x" * 60 + b'"}', headers=JSON)
        assert again.status_code == 200

    in_room(main, max_request_bytes=100, max_total_request_bytes=100)


def test_refused_and_broken_bodies_free_their_bytes() -> None:
    async def main(room: Room) -> None:
        for content, status in ((b"{" * 90, 400), (pieces(b"{" * 60, b"{" * 60), 413), (b'{"text": 1}', 400)):
            answer = await room.client.post("/v1/echo", content=content, headers=JSON)
            assert answer.status_code == status
        whole = await room.client.post("/v1/echo", content=b'{"text": "' + b"x" * 88 + b'"}', headers=JSON)
        assert whole.status_code == 200

    in_room(main, max_request_bytes=100, max_total_request_bytes=100)


@pytest.mark.parametrize("has_keys", [True, False])
def test_one_client_cannot_take_the_bytes_of_all(has_keys: bool) -> None:
    keys = [{"authorization": f"Bearer {key}"} if has_keys else {} for key in "ab"]

    async def main(room: Room) -> None:
        held = await room.hold(b"x" * 80, **keys[0])
        refused = await room.client.post("/v1/form", content=b"y" * 30, headers=keys[0])
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "--max-client-request-bytes" in refused.json()["error"]["message"]

        body = b'{"text": "' + b"x" * 78 + b'"}'
        transport = httpx.ASGITransport(room.app, client=("127.0.0.1" if has_keys else "127.0.0.2", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as other:
            answer = await other.post("/v1/echo", content=body, headers=JSON | keys[1])
        assert answer.status_code == 200
        room.let.set()
        await held
        assert (await room.client.post("/v1/echo", content=body, headers=JSON | keys[0])).status_code == 200

    in_room(main, max_request_bytes=100, max_total_request_bytes=200, api_key=["a", "b"] if has_keys else None)


@pytest.mark.parametrize(
    ("path", "content_type"),
    [("/v1/echo", "application/json"), ("/v1/form", "multipart/form-data; boundary=x"), ("/v1/hold", "text/plain")],
)
def test_a_body_that_stops_is_refused_and_frees_its_bytes(
    path: str, content_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.1)
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def stopping() -> AsyncIterator[bytes]:
        yield body
        await asyncio.Event().wait()

    async def main(room: Room) -> None:
        refused = await room.client.post(path, content=stopping(), headers={"content-type": content_type})
        assert refused.status_code == 408 and refused.headers["connection"] == "close"
        assert "--min-body-rate" in refused.json()["error"]["message"]
        monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 60.0)
        whole = await room.client.post("/v1/echo", content=b'{"text": "' + b"x" * 88 + b'"}', headers=JSON)
        assert whole.status_code == 200

    in_room(main, max_request_bytes=100, max_total_request_bytes=100)


def test_a_slow_body_is_read_if_it_has_the_lowest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(middleware, "time", clock)

    async def trickling() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(20):  # Much longer than the patience; 5 bytes a second.
            clock.now += 5
            yield b"x" * 25
        yield b'"}'

    async def main(room: Room) -> None:
        answer = await room.client.post("/v1/echo", content=trickling(), headers=JSON)
        statuses.append(answer.status_code)

    statuses: list[int] = []
    in_room(main, min_body_rate=1)
    in_room(main, min_body_rate=1000)
    assert statuses == [200, 408]
