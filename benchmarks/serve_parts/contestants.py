# SPDX-License-Identifier: Apache-2.0
"""Who is compared: a server with a client in a process of its own, and a program with the pipeline inside it.

Both are started and stopped here, and take loads. Knows nothing of reports.
"""

import multiprocessing
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve_parts import direct_client, http_client
from serve_parts.loads import Load, Session

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Contestant:
    name: str
    connection: Connection

    def run(self, load: Load) -> Session:
        self.connection.send(load)
        return self.connection.recv()


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        pid: The process that listens; its stages have others.
    """

    port: int
    pid: int


@contextmanager
def start_server(model: Path, flags: list[str], log: Path) -> Iterator[Server]:
    """`vllm serve MODEL --omni`, as users start it.

    Raises:
        RuntimeError: It ended, or was not ready in time; with what it wrote.
    """
    port = _free_port()
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(model), "--omni", "--host=127.0.0.1", f"--port={port}", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, port, log)
        yield Server(port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextmanager
def http_contestant(name: str, server: Server, requests: dict[str, list[bytes]]) -> Iterator[Contestant]:
    """A client of a server. `requests`: see `asks`."""
    with _process(http_client.serve_loads, server.port, server.pid, requests) as connection:
        yield Contestant(name, connection)


@contextmanager
def direct_contestant(
    name: str, model: Path, llm_args: dict[str, Any], questions: list[dict[str, Any]], params: list[Any]
) -> Iterator[Contestant]:
    """A program that calls `AsyncOmniLLM`; `params` are those of `asks.sampling_params`."""
    with _process(direct_client.serve_loads, str(model), llm_args, questions, params) as connection:
        connection.recv()  # ready; EOFError: it failed, and has said why on stderr
        yield Contestant(name, connection)


@contextmanager
def _process(main: Any, *args: Any) -> Iterator[Connection]:
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=main, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.2)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:  # URLError, and a connection that is refused
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
