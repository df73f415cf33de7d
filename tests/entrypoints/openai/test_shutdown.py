# SPDX-License-Identifier: Apache-2.0
"""The end of a server's process: by signals, after running requests, and without leaks."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.entrypoints.fake_pipelines import wait_until_ended
from tests.forked_programs import ForkedProgram
from tests.servers import SMALL_VLLM, RunningServer

pytestmark = pytest.mark.slow

# The signal arrives where Python can only print an exception, while a pipeline starts.
SIGNALLED_START = """
import os, signal, time
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.entrypoints.openai import server_process

class Signalling:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

class StartingLLM:
    def __init__(self, *, on_open, **kwargs):
        on_open(lambda: print("closed"))
        Signalling()
        while True:
            time.sleep(1)

server_process.AsyncOmniLLM = StartingLLM
server_process.run(OmniServeCommand().parse(["MODEL", "--host=127.0.0.1", "--port=0"]).args, {})
"""


def run_dirs(pid: int) -> set[Path]:
    """Those that a process holds."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {Path(link) for link in links if "vllm_omni-run-" in link}


class EndingServer(RunningServer):
    """A server of a text model, with helpers for its end."""

    def note_processes(self) -> None:
        """The processes that must have ended with it, and the directories that must be gone."""
        self.processes = psutil.Process(self.process.pid).children(recursive=True)
        self.run_dirs = run_dirs(self.process.pid)

    def has_stage(self) -> bool:
        """Whether its stage was forked. Imports of libraries start other processes for a moment."""
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return any("vllm_omni::text" in " ".join(child.cmdline()) for child in children)
        return False

    def stream(self, num_tokens: int) -> Iterator[str]:
        """Pieces of a text with this number of tokens; then `[DONE]`, or the server's error."""
        body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def wait_until_it_refuses(self) -> httpx.Response:
        """The answer to a request after the signal."""
        while True:
            response = httpx.post(f"{self.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1}, timeout=60)
            if response.status_code != 200:
                return response

    def check_it_left_nothing(self) -> None:
        wait_until_ended(self.processes)
        assert self.run_dirs and not any(path.exists() for path in self.run_dirs)


@pytest.fixture(scope="module")
def servers(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EndingServer]]:
    """Two start at once, because a start takes long; the third is a fork."""
    folder = tmp_path_factory.mktemp("ending")
    started = {
        name: EndingServer(tiny_qwen3, *SMALL_VLLM, *flags, log=folder / name, wait=False)
        for name, flags in {
            "patient": ("--shutdown-timeout=60",),
            "starting": (),
        }.items()
    }
    try:
        flags = (*SMALL_VLLM, "--shutdown-timeout=600")
        started["hurried"] = EndingServer(tiny_qwen3, *flags, log=folder / "hurried")
        yield started
    finally:
        for server in started.values():
            if server.process.poll() is None:
                server.process.kill()


def test_a_signal_during_the_start_raises_nothing(tmp_path: Path) -> None:
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(SIGNALLED_START)
    code = ForkedProgram(program, [], output).wait()
    printed = output.read_text()
    assert code == 130 and "closed\n" in printed, printed
    assert "SIGTERM: the start is interrupted" in printed
    assert "Traceback" not in printed


def test_sigterm_ends_a_server_that_starts(servers: dict[str, EndingServer]) -> None:
    server = servers["starting"]
    while not server.has_stage():
        assert server.process.poll() is None, server.output()
        time.sleep(0.05)  # There is no event for the start of its stages.
    server.note_processes()
    assert server.stop(signal.SIGTERM, timeout=240) == 130, server.output()
    assert "Traceback" not in server.output()
    server.check_it_left_nothing()


def test_a_shutdown_finishes_running_requests_within_its_timeout(servers: dict[str, EndingServer]) -> None:
    server = servers["patient"]
    server.wait_until_ready()
    server.note_processes()
    with ThreadPoolExecutor(1) as pool:
        pieces = server.stream(1000)
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        refused = pool.submit(server.wait_until_it_refuses)
        *texts, last = list(pieces)
        assert last == "[DONE]"
        assert json.loads(texts[-1])["choices"][0]["finish_reason"] == "length"
        with suppress(httpx.TransportError):  # The server may have ended before it arrived.
            assert refused.result().status_code == 503
    assert server.process.wait() == 0, server.output()
    assert "Traceback" not in server.output()
    server.check_it_left_nothing()


def test_a_second_signal_ends_the_wait(servers: dict[str, EndingServer]) -> None:
    server = servers["hurried"]
    server.wait_until_ready()
    server.note_processes()
    pieces = server.stream(2000)
    next(pieces)
    server.process.send_signal(signal.SIGINT)
    assert server.wait_until_it_refuses().status_code == 503
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    rest = list(pieces)
    assert any(json.loads(piece)["error"]["code"] == 503 for piece in rest if "error" in piece), rest[-3:]
    assert server.process.wait() == 0, server.output()
    server.check_it_left_nothing()
