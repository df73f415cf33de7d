# SPDX-License-Identifier: Apache-2.0
"""The nginx block of docs/deployment.md, in a real nginx before the application."""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import websockets.sync.client
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse

from tests.docs.pages import ROOT, snippets
from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE
from tests.entrypoints.openai.fake_server import FakeServer, over_http
from tests.servers import free_port, running_program
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.server_args import MIB, RequestLimits

pytestmark = pytest.mark.slow

(BLOCK,) = (snippet.text for snippet in snippets("nginx", pages=[ROOT / "docs" / "deployment.md"]))
CLIENT = "127.0.0.2"
"""Another address of this machine."""
CONFIG = """
daemon off; pid {folder}/pid; error_log stderr; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        {block}
    }}
}}
"""


@pytest.fixture(scope="module")
def released() -> threading.Event:
    """Ends the stream, and what waits."""
    return threading.Event()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, released: threading.Event) -> Iterator[str]:
    """Our application below /omni, with paths that do what a test needs; its URL."""
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [AUDIO_STAGE]) as llm:
        app = FakeServer(llm, "--root-path=/omni").app
        _add_paths(app, released)
        with over_http(app) as url:
            yield url


def _add_paths(app: FastAPI, released: threading.Event) -> None:
    @app.get("/address")
    def address(request: Request) -> list[str]:
        assert request.client is not None
        return [request.client.host, str(request.url)]

    @app.get("/stream")
    def stream() -> StreamingResponse:
        def pieces() -> Iterator[str]:
            yield "first"
            assert released.wait(60)
            yield "last"

        return StreamingResponse(pieces())

    @app.get("/wait")
    def wait() -> None:
        assert released.wait(60)

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())


@contextmanager
def nginx(server: str, folder: Path, block: str = BLOCK) -> Iterator[str]:
    """The address of what the block serves."""
    if not (program := shutil.which("nginx")):
        pytest.skip("nginx is missing; as root: make programs")
    port, config = free_port(), folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # Its workers write to the folder.
    text = CONFIG.format(folder=folder, port=port, user=user, block=block.replace("http://127.0.0.1:8000", server))
    config.write_text(text)
    command = [program, "-p", folder, "-c", config, "-e", "stderr"]
    with running_program(command, lambda: _listens(port), folder / "log.txt"):
        yield f"http://127.0.0.1:{port}/omni"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def proxy(server: str, tmp_path: Path) -> Iterator[str]:
    with nginx(server, tmp_path) as url:
        yield url


def test_serves_the_api_and_its_docs(proxy: str) -> None:
    body = {"input": "2 pieces", "voice": "default", "response_format": "pcm"}
    speech = httpx.post(f"{proxy}/v1/audio/speech", json=body, timeout=60)
    assert (speech.status_code, len(speech.content)) == (200, 2 * 2 * 8000)
    page = httpx.get(f"{proxy}/docs", timeout=60)
    for file in re.findall(r'static/[^"]+', page.text):
        assert httpx.get(f"{proxy}/{file}", timeout=60).status_code == 200


def test_passes_the_addresses_on(proxy: str) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=CLIENT), timeout=60) as client:
        assert client.get(f"{proxy}/address").json() == [CLIENT, f"{proxy}/address"]


def test_a_stream_arrives_as_it_is_made(proxy: str, released: threading.Event) -> None:
    released.clear()
    with httpx.stream("GET", f"{proxy}/stream", timeout=30) as answer:
        pieces = answer.iter_text()
        assert next(pieces) == "first"
        released.set()
        assert next(pieces) == "last"


def test_lets_web_sockets_through(proxy: str) -> None:
    with websockets.sync.client.connect(f"ws{proxy.removeprefix('http')}/echo") as client:
        client.send("hello")
        assert client.recv(timeout=30) == "hello"


def test_an_answer_may_take_as_long_as_the_block_says(server: str, tmp_path: Path, released: threading.Event) -> None:
    assert "proxy_read_timeout 1h;" in BLOCK
    released.clear()
    with nginx(server, tmp_path, BLOCK.replace("1h", "1s")) as url:
        start = time.monotonic()
        assert httpx.get(f"{url}/wait", timeout=30).status_code == 504
        assert time.monotonic() - start >= 1
    released.set()


def test_bodies_may_be_as_large_as_the_server_takes(proxy: str) -> None:
    limit = RequestLimits().max_request_bytes
    assert f"client_max_body_size {limit // MIB}m;" in BLOCK
    body, headers = bytes(2 * MIB), {"content-type": "audio/wav"}  # nginx's own limit is 1 MiB.
    assert httpx.post(f"{proxy}/address", content=body, headers=headers, timeout=60).status_code == 405
