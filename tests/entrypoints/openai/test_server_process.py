# SPDX-License-Identifier: Apache-2.0
"""The address of a server: Unix sockets that are used again, ports that the system chooses, and what the log has."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entrypoints.openai.media_apps import server_args
from vllm_omni.entrypoints.openai import server_process
from vllm_omni.entrypoints.openai.server_process import is_logged, listening, pages


def bind(path: Path) -> socket.socket:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    return unix


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short one: that of a Unix socket has at most 107 bytes."""
    monkeypatch.chdir(tmp_path)
    return Path("socket")


def test_a_unix_socket_is_removed_at_the_end(path: Path) -> None:
    for _ in range(2):
        with listening(server_args("model", f"--uds={path}")) as (address, listener):
            assert address == "unix:socket" and listener.getsockname() == "socket"
        assert not path.exists()


def test_a_unix_socket_that_a_killed_server_has_left_is_used_again(path: Path) -> None:
    bind(path).close()
    assert path.is_socket()
    with listening(server_args("model", f"--uds={path}")) as (_, listener):
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("listens", [True, False])
def test_a_unix_socket_of_a_running_server_is_kept(path: Path, listens: bool) -> None:
    with bind(path) as other:
        if listens:
            other.listen()
        with pytest.raises(OSError, match="in use"), listening(server_args("model", f"--uds={path}")):
            pass
        assert path.is_socket()


def test_another_file_is_kept(path: Path) -> None:
    path.write_text("notes")
    with pytest.raises(OSError, match="in use"), listening(server_args("model", f"--uds={path}")):
        pass
    assert path.read_text() == "notes"


def test_the_socket_of_the_next_server_is_kept(path: Path) -> None:
    with listening(server_args("model", f"--uds={path}")):
        os.unlink(path)
        next_server = bind(path)
    assert path.is_socket()
    next_server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_log_has_the_port_that_the_system_has_chosen(host: str) -> None:
    args = server_args("model", f"--host={host}", "--port=0")
    with listening(args) as (address, listener):
        port = listener.getsockname()[1]
        assert port > 0 and args.port == port
        assert address == f"http://{f'[{host}]' if ':' in host else host}:{port}"


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (["--port=8001"], "http://localhost:8001"),
        (["--host=0.0.0.0"], "http://localhost:8000"),
        (["--host=::"], "http://localhost:8000"),
        (["--host=10.0.0.0"], "http://10.0.0.0:8000"),
        (["--host=::1", "--port=9000"], "http://[::1]:9000"),
        (["--host=example.org", "--ssl-certfile=both.pem"], "https://example.org:8000"),
        (["--ssl-certfile=cert.pem", "--ssl-keyfile=key.pem"], "https://localhost:8000"),
        (["--root-path=/omni"], "http://localhost:8000"),
    ],
)
def test_the_addresses_in_the_log(flags: list[str], url: str) -> None:
    shown = dict(pages(server_args("model", *flags)))
    assert shown == {"API": f"{url}/v1", "playground": "not served; add --playground", "docs": f"{url}/docs"}
    assert dict(pages(server_args("model", "--playground", *flags)))["playground"] == f"{url}/playground"


@pytest.mark.parametrize("root_path", ["", "/proxied"])
def test_what_the_access_log_leaves_out(root_path: str) -> None:
    polls = ("/health", "/metrics", "/readyz", "/static/swagger-ui.css", "/v1/pipeline/requests/1", "/v1/videos/1")
    logged = ("/", "/docs", "/v1/videos", "/v1/videos/1/content", "/v1/models", "/healthy")

    def has_line(method: str, path: str, status: int = 200) -> bool:
        """As uvicorn logs it."""
        args = ("1.2.3.4:5", method, f"{root_path}{path}?query", "1.1", status)
        return is_logged(root_path, logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "", args, None))

    assert [path for path in polls + logged if has_line("GET", path)] == [*logged]
    assert has_line("DELETE", "/v1/videos/1") and has_line("GET", "/health", 503)
    assert not any(has_line(method, "/playground/gradio_api/queue/join") for method in ("GET", "POST"))


def test_an_address_in_the_log_refuses_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the log's line and uvicorn's own `listen` the application starts, for seconds with a playground."""

    async def build_omni_app(client: Any, args: Any) -> None:
        pass

    async def serve_http(app: Any, sock: socket.socket, **options: Any) -> Any:
        socket.create_connection(sock.getsockname(), timeout=60).close()
        return asyncio.sleep(0)

    monkeypatch.setattr(server_process, "build_omni_app", build_omni_app)
    monkeypatch.setattr(server_process, "serve_http", serve_http)
    client: Any = SimpleNamespace(config=SimpleNamespace(output_types=["text"]))
    args = server_args("model", "--host=127.0.0.1", "--port=0")
    with listening(args) as (address, listener):
        asyncio.run(server_process._serve(client, address, listener, args))


def test_only_what_is_served_has_an_address() -> None:
    assert "docs" not in dict(pages(server_args("model", "--disable-fastapi-docs")))
    assert not dict(pages(server_args("model", "--uds=socket")))


def test_the_address_of_a_certificate_with_its_key() -> None:
    with listening(server_args("model", "--host=127.0.0.1", "--port=0", "--ssl-certfile=both.pem")) as (address, _):
        assert address.startswith("https://127.0.0.1:")
