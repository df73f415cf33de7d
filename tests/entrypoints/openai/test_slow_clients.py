# SPDX-License-Identifier: Apache-2.0
"""Clients that read their answer slowly or not at all, at a web server with a pipeline of one slot."""

import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from tests.entrypoints.fake_pipelines import is_idle, running
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, NUM_SAMPLES
from tests.entrypoints.openai.fake_server import FakeServer, over_http
from tests.entrypoints.openai.small_apps import make_app
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.http_protocol import http_protocol

PATH = "/v1/audio/speech"
LONG = {"input": "400 pieces", "response_format": "pcm"}
NUM_BYTES = 400 * NUM_SAMPLES * 2
STREAMS: list[dict[str, Any]] = [{"stream": False}, {}, {"stream_format": "sse"}]
BIG = b"x" * (32 << 20)


class Reader:
    """A client of a raw socket, whose system takes few bytes that it has not read."""

    def __init__(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        host, port = url.removeprefix("http://").split(":")
        self._socket.connect((host, int(port)))
        content = b"" if body is None else json.dumps(body).encode()
        self._socket.sendall(
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def read(self, num_bytes: int) -> bytes:
        """Up to so many bytes; none at the end, or if the server has closed the connection."""
        try:
            return self._socket.recv(num_bytes)
        except ConnectionResetError:
            return b""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    folder = tmp_path_factory.mktemp("config")
    with running(AsyncOmniLLM, folder, [AUDIO_STAGE], max_inflight=1, max_queued=0) as llm:
        yield llm


def speak(url: str) -> int:
    """The status of a short request."""
    return httpx.post(url + PATH, json={"input": "1 piece"}, timeout=60).status_code


def wait_for_slot(url: str) -> None:
    deadline = time.monotonic() + 60
    while (status := speak(url)) == 429:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # There is no event for it.
    assert status == 200


def wait_until_made(llm: AsyncOmniLLM, reader: Reader) -> None:
    assert reader.read(12) == b"HTTP/1.1 200"
    while not is_idle(llm):
        time.sleep(0.01)


@pytest.mark.parametrize("how", STREAMS)
def test_a_slot_is_held_until_the_answer_has_been_read(llm: AsyncOmniLLM, how: dict[str, Any]) -> None:
    with over_http(FakeServer(llm).app) as url, Reader(url, PATH, LONG | how) as reader:
        wait_until_made(llm, reader)
        assert speak(url) == 429
        while reader.read(1 << 20):
            pass
        wait_for_slot(url)


@pytest.mark.parametrize("how", STREAMS)
def test_a_client_that_reads_nothing_is_ended(llm: AsyncOmniLLM, how: dict[str, Any]) -> None:
    with over_http(FakeServer(llm).app, http=http_protocol(0.5)) as url, Reader(url, PATH, LONG | how) as reader:
        wait_until_made(llm, reader)
        wait_for_slot(url)
        num_bytes = 0
        while chunk := reader.read(1 << 20):  # What was on its way; then the connection is closed.
            num_bytes += len(chunk)
        assert num_bytes < NUM_BYTES


@pytest.mark.parametrize("how", STREAMS[1:])
def test_what_a_client_does_not_read_is_limited_in_bytes(llm: AsyncOmniLLM, how: dict[str, Any]) -> None:
    """Long before it is ended for its slowness; no part is taken for the whole."""
    limits = ("max-realtime-message-bytes", "max-client-realtime-bytes", "max-total-realtime-bytes")
    app = FakeServer(llm, *(f"--{limit}={4 << 20}" for limit in limits)).app
    with over_http(app) as url, Reader(url, PATH, LONG | how) as reader:
        assert reader.read(12) == b"HTTP/1.1 200"
        while not is_idle(llm):
            time.sleep(0.01)
        received = b""
        while chunk := reader.read(1 << 20):
            received += chunk
        assert len(received) < NUM_BYTES and (b"--max-client-realtime-bytes" in received) == ("stream_format" in how)
        assert received.endswith(b"0\r\n\r\n") == ("stream_format" in how)
        wait_for_slot(url)
        assert app.state.omni_sessions.budget.num_bytes == 0


def test_a_client_that_reads_slowly_gets_its_answer() -> None:
    app = make_app()
    app.get("/big")(lambda: Response(BIG))
    with over_http(app, http=http_protocol(1)) as url, Reader(url, "/big") as reader:
        started, received = time.monotonic(), 0
        while chunk := reader.read(1 << 20):
            received += len(chunk)
            if time.monotonic() - started < 3:  # Longer than a client may read nothing.
                time.sleep(0.05)
    assert received > len(BIG)


@pytest.mark.slow
def test_a_client_that_reads_all_the_time_is_not_ended() -> None:
    """The server's system takes more of the answer only after longer than a client may read nothing."""
    app = make_app()

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(BIG), 1 << 16):
            yield BIG[start : start + (1 << 16)]

    app.get("/big")(lambda: StreamingResponse(pieces()))
    with over_http(app, http=http_protocol(1, 1_000)) as url, Reader(url, "/big") as reader:
        started, received = time.monotonic(), 0
        while chunk := reader.read(1 << 13 if time.monotonic() - started < 6 else 1 << 20):
            received += len(chunk)
            if time.monotonic() - started < 6:
                time.sleep(0.04)
    assert received > len(BIG)
