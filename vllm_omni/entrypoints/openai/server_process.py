# SPDX-License-Identifier: Apache-2.0
"""The process of a server: its socket, its signals, its memory; it opens the pipeline, and serves until a signal.

SIGTERM and Ctrl-C while a server starts: a start is in the libraries of others for minutes, where it downloads, imports
and loads. An exception out of a signal's handler would be raised anywhere in them, also where Python can only print it,
so a thread ends the process instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import signal
import socket
import stat
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Self, cast

import uvloop
import vllm.envs as envs
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.entrypoints.openai import media_input
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_protocol import http_protocol, web_socket_protocol
from vllm_omni.entrypoints.openai.middleware import PLAYGROUND_PATH
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits, RequestLimits, ServerLimits, limits_from
from vllm_omni.entrypoints.start_progress import showing
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.metrics.logs import log_warnings
from vllm_omni.metrics.memory import release_free_memory, return_large_blocks
from vllm_omni.metrics.status_line import clear_line

logger = logging.getLogger("vllm.omni.server")

_UVICORN_OPTIONS = (
    "host", "port", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers",
    "h11_max_incomplete_event_size", "h11_max_header_count",
)  # fmt: skip

# After all requests have ended: how long clients may take to receive their answers.
_FLUSH_S = 5

UNSENT_BYTES = 1 << 17

_ALL_ADDRESSES = ("0.0.0.0", "::")

_POLLED = re.compile(r"/(health|readyz|ping|metrics|static/.*|v1/pipeline/requests/[^/]+|v1/videos/[^/]+)")

_EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(args: Namespace, llm_args: dict[str, Any], fork_server: ForkServer | None = None) -> None:
    """Serves a pipeline until SIGTERM or SIGINT, and cleans up.

    Args:
        args: Of `vllm serve`.
        llm_args: Keyword arguments of `AsyncOmniLLM`.
        fork_server: One that was started before, for the stages.

    Raises:
        OmniError: The pipeline cannot be started, or ended on an error of its own.
        OSError: The server cannot listen on the address.
    """
    with StartSignals() as start:
        return_large_blocks()
        media_input.install(args)
        with (
            listening(args) as (address, listener),  # Before the stages start: an address in use fails at once.
            AsyncOmniLLM(**llm_args, fork_server=fork_server, on_open=start.on_open) as llm,
        ):
            client = ServedEngineClient(llm, shutdown_timeout=args.shutdown_timeout, voice_map=args.voice_map)
            uvloop.run(_serve(client, address, listener, args))
            # vLLM's server ends because of it; what watches this process starts it again.
            if llm.error is not None:
                raise client.dead_error


class ServedEngineClient(OmniEngineClient):
    """The engine of a server that ends with a signal. vLLM's launcher handles the first signal only."""

    loop: asyncio.AbstractEventLoop

    def shutdown(self, timeout: float | None = None) -> None:
        """Shuts down as the base; another signal ends the wait for running requests."""
        for sig in (signal.SIGINT, signal.SIGTERM):
            self.loop.call_soon_threadsafe(self.loop.add_signal_handler, sig, self.cancel_wait)
        super().shutdown(timeout)


async def _serve(client: ServedEngineClient, address: str, listener: Any, args: Namespace) -> None:
    client.loop = asyncio.get_running_loop()
    with showing("starting the HTTP server"):
        app = await build_omni_app(client, args)
    release_free_memory()
    log_warnings()
    listener.listen()  # A client that comes before the application has started waits, and is not refused.
    logger.info("Serving %s on %s", ", ".join(client.config.output_types), address)
    for name, url in pages(args):
        logger.info("%-10s  %s", name, url)
    log_config = get_uvicorn_log_config(args)
    logging.getLogger("uvicorn.access").addFilter(partial(is_logged, args.root_path or ""))
    watch = (limits_from(args, ServerLimits).send_timeout_s, limits_from(args, RequestLimits).min_body_rate)
    options = {name: getattr(args, name) for name in _UVICORN_OPTIONS}
    options |= {} if log_config is None else {"log_config": log_config}
    shutdown = await serve_http(
        app,
        sock=listener,
        http=http_protocol(*watch),
        enable_ssl_refresh=args.enable_ssl_refresh,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=_FLUSH_S,
        ws=web_socket_protocol(*watch),
        ws_max_size=limits_from(args, RealtimeLimits).max_realtime_message_bytes,
        **options,
    )
    await shutdown


def is_logged(root_path: str, record: logging.LogRecord) -> bool:
    """Whether the access log has a line of uvicorn's: of requests that succeed not the traffic of an open page, nor
    polls."""
    _, method, path, _, status = cast("tuple[Any, ...]", record.args)
    path = path.partition("?")[0].removeprefix(root_path)
    is_polled = path.startswith(PLAYGROUND_PATH) or (method in ("GET", "HEAD") and _POLLED.fullmatch(path))
    return status >= HTTPStatus.BAD_REQUEST or not is_polled


def pages(args: Namespace) -> Iterator[tuple[str, str]]:
    """What a user of this machine opens, and where. Without `--root-path`: that is where a proxy has it."""
    if args.uds:
        return
    host = "localhost" if args.host in (None, "", *_ALL_ADDRESSES) else args.host
    url = f"{_scheme(args)}://{f'[{host}]' if ':' in host else host}:{args.port}"
    yield "API", f"{url}/v1"
    yield "playground", f"{url}{PLAYGROUND_PATH.rstrip('/')}" if args.playground else "not served; add --playground"
    if not args.disable_fastapi_docs:
        yield "docs", f"{url}/docs"


def _scheme(args: Namespace) -> str:
    return "https" if args.ssl_certfile else "http"  # Its file may have the key, too.


class StartSignals:
    """Makes a signal close the pipeline and end the process, until a running server handles signals itself.

    For the main thread.
    """

    def __init__(self) -> None:
        self._close: Callable[[], None] = lambda: None
        # Its `put` is reentrant: the handler may interrupt anything, also itself.
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="omni-start-signals", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Does not return after a signal: an error is that of a pipeline that was closed while it started."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._received.put(None)
        self._thread.join()

    def on_open(self, close: Callable[[], None]) -> None:
        """See `OmniBase`."""
        self._close = close

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received.put(number)

    def _wait(self) -> None:
        number = self._received.get()
        if number is None:
            return
        logger.error("%s: the start is interrupted", signal.Signals(number).name)
        self._close()
        clear_line(sys.stdout)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_EXIT_CODE)


@contextmanager
def listening(args: Namespace) -> Iterator[tuple[str, socket.socket]]:
    """The address for the log, and a socket that is bound to it; vLLM's, for `--uds`, or `--host` and `--port`.

    Sets `args.port` if the system has chosen the port. A Unix socket's file is removed at the end, and one that a
    killed server has left is removed at the start.

    Raises:
        OSError: The address is in use, or cannot be used.
    """
    if args.uds:
        _remove_unused(args.uds)
    address, listener = setup_server(args, reuse_port=False)
    with listener:
        if args.uds:
            bound = os.stat(args.uds)
            try:
                yield address, listener
            finally:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(args.uds), bound):  # It may be another server's by now.
                        os.unlink(args.uds)
            return
        address = f"{_scheme(args)}:{address.partition(':')[2]}"
        if args.port == 0:
            args.port = listener.getsockname()[1]
            address = f"{address.removesuffix(':0')}:{args.port}"
        limit_kernel_buffer(listener)
        yield address, listener


def limit_kernel_buffer(listener: socket.socket) -> None:
    """Has the system take little more of an answer than the client's window, so that progress is seen as it is made."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _remove_unused(path: str) -> None:
    """Removes the file of a Unix socket that no process has open."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:  # A socket of another type: a server that listens, or that still starts.
                pass
