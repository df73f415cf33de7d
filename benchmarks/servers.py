# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own, ours and plain vLLM's, and the load of `vllm bench serve --omni` on them."""

import io
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from backends import REPETITION_PENALTY

from vllm_omni.entrypoints.cli.bench import run_bench_serve
from vllm_omni.entrypoints.cli.bench_requests import BACKENDS

CODES_PER_SECOND = 12.5
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 60.0
TEXT_REQUESTS = 8
"""Requests for text alone to one with speech: they are so much shorter."""


@dataclass(frozen=True)
class Plan:
    concurrencies: list[int]
    rounds: int
    min_requests: int
    text_tokens: int
    speech_seconds: float

    @property
    def talker_params(self) -> dict[str, Any]:
        """The last token of a Qwen3-Omni talker makes no frame."""
        tokens = round(CODES_PER_SECOND * self.speech_seconds) + 1
        length = {"min_tokens": tokens, "max_tokens": tokens, "detokenize": False}
        return {"temperature": 0.0, "repetition_penalty": REPETITION_PENALTY, **length}


@dataclass(frozen=True)
class Target:
    """Where load goes.

    Attributes:
        name: In the table.
        backend: As of `vllm bench serve --backend`.
        pid: Of the server's process, which may have children; None: the caller's, whose CPU time is not counted.
    """

    name: str
    backend: str
    url: str
    pid: int | None
    model: Path

    def run(self, plan: Plan, concurrency: int, body: dict[str, Any]) -> dict[str, Any]:
        """The result of `vllm bench serve`, and `cpu_per_request`: the CPU time of the server for each request."""
        if self.pid is None:
            return self._run(plan, concurrency, body)
        before = cpu_seconds(self.pid)
        result = self._run(plan, concurrency, body)
        return result | {"cpu_per_request": (cpu_seconds(self.pid) - before) / max(result["completed"], 1)}

    def _run(self, plan: Plan, concurrency: int, body: dict[str, Any]) -> dict[str, Any]:
        """Its tables are not shown."""
        sampling = ["--temperature=0"] if "chat" in self.backend or self.backend == "direct" else []
        num_requests = max(plan.min_requests, 2 * concurrency)
        if self.backend == "openai-chat":  # short requests: a round shall not be one pause of a process
            num_requests *= TEXT_REQUESTS
        with redirect_stdout(io.StringIO()):
            return run_bench_serve(
                [
                    f"--backend={self.backend}", f"--base-url={self.url}", "--endpoint=" + _endpoint(self.backend),
                    f"--model={self.model}", "--dataset-name=random", "--input-len=32",
                    f"--output-len={plan.text_tokens}", f"--num-prompts={num_requests}",
                    f"--max-concurrency={concurrency}", "--disable-tqdm", f"--extra-body={json.dumps(body)}",
                    "--ignore-eos" if self.backend == "openai-chat" else "--percentile-metrics=ttft,e2el", *sampling,
                ]
            )  # fmt: skip


def _endpoint(backend: str) -> str:
    return BACKENDS[backend].endpoint if backend in BACKENDS else "/v1/chat/completions"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants so far, those that have ended included."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


@dataclass(frozen=True)
class Server:
    """A server that is ready, in a process of its own, which may have children."""

    url: str
    pid: int


@contextmanager
def start_server(command: list[str], folder: Path) -> Iterator[str]:
    """The URL of a server. Raises as `run_server`."""
    with run_server(command, folder) as server:
        yield server.url


@contextmanager
def run_server(command: list[str], folder: Path) -> Iterator[Server]:
    """
    Raises:
        RuntimeError: It ended, or was not ready in time; with its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
    with log.open("wb") as output:
        command = [*command, "--host=127.0.0.1", f"--port={port}"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield Server(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except OSError:  # URLError, and a refused connection
        return False


def omni_server(model: Path, *flags: str) -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--omni", *flags]


def plain_server(model: Path, *flags: str) -> list[str]:
    # The script of vLLM's CPU build does not start without --omni.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *flags]
