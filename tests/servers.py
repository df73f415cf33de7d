# SPDX-License-Identifier: Apache-2.0
"""A server in a separate process, for tests over HTTP."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from tests.forked_programs import ForkedProgram

if TYPE_CHECKING:  # pytest itself, which waits for this module, needs no client.
    import openai

# Small enough for a tiny model on any machine.
SMALL_VLLM = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--kv-cache-memory-bytes=67108864",
    "--max-num-seqs=16",
)  # fmt: skip

# With random weights it may end speech before it has begun.
SMALL_CSM = (
    *SMALL_VLLM, "--stage.backbone.default_sampling_params.max_tokens=41",
    "--stage.backbone.default_sampling_params.ignore_eos=true",
)  # fmt: skip

ENDLESS = "100000"
"""Steps of a diffusion request that only an abort ends: those that a server allows by itself take seconds."""
ENDLESS_STEPS = f"--stage.diffusion.engine_args.max_steps={ENDLESS}"
SAME_PAINTING = "--stage.diffusion.default_sampling_params.seed=0"
"""For `shapes-painter`, which is wrong for one seed in a hundred."""

_VLLM = Path(sys.executable).with_name("vllm")
"""vLLM's own script, which runs our command for `--omni`."""


class RunningServer:
    """`vllm serve MODEL --omni`, from its start until `stop()`."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        log: Path,
        env: dict[str, str] | None = None,
        wait: bool = True,
        port: int | None = None,
    ) -> None:
        """
        Args:
            log: The file for its output.
            env: Variables in addition to those of this process.
            wait: Return when it is ready. Without, it starts in an interpreter of its own, as for users.
            port: Default: a free one.
        """
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        arguments = ["serve", str(model), "--omni", "--host=127.0.0.1", f"--port={self.port}", *flags]
        self.process: subprocess.Popen[bytes] | ForkedProgram
        if wait:
            self.process = ForkedProgram(_VLLM, arguments, log, env)
        else:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    _tied([_VLLM, *arguments]), stdout=output, stderr=output, env={**os.environ, **(env or {})}
                )
        if wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.process.kill()
                raise

    @property
    def model(self) -> str:
        """The name of its model."""
        return httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"]

    def openai(self, **arguments: object) -> openai.OpenAI:
        """The official client, without retries."""
        import openai

        arguments = {"api_key": "none", "max_retries": 0, **arguments}
        return openai.OpenAI(base_url=f"{self.url}/v1", **arguments)  # type: ignore[arg-type]

    def async_openai(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait_until_ready(self, timeout: float = 240) -> None:
        _wait(self.process, self.is_ready, self.log, timeout)

    def is_ready(self) -> bool:
        return answers(f"{self.url}/health")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Ends it; returns its exit code.

        After SIGKILL its stages end by themselves, and hold its run directory until then: the next start removes that
        directory only if they have ended.
        """
        stages = []
        if self.process.poll() is None:
            if sig == signal.SIGKILL:
                stages = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(sig)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        _, left = psutil.wait_procs(stages, timeout)
        assert not left, f"they outlive a killed server: {left}"
        return code


@contextmanager
def running_program(
    command: Sequence[object],
    is_ready: Callable[[], bool],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_with: signal.Signals = signal.SIGTERM,
) -> Iterator[None]:
    """Another server, from when it is ready to its end.

    Args:
        log: The file for its output.
        env: Default: this process's.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(_tied(command), env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, is_ready, log, timeout=240)
        yield
    finally:
        process.send_signal(ends_with)
        process.wait()


def answers(url: str) -> bool:
    """Whether it is served."""
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=60, verify=False).status_code == 200  # It reads no certificates.
    return False


def _wait(
    process: subprocess.Popen[bytes] | ForkedProgram, is_ready: Callable[[], bool], log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while not is_ready():
        output = log.read_text(errors="replace")
        assert process.poll() is None, f"it exited with {process.returncode}:\n{output}"
        assert time.monotonic() < deadline, f"not ready after {timeout} s:\n{output}"
        time.sleep(0.1)  # There is no event for it.


def _tied(command: Sequence[object]) -> list[str]:
    """The kernel ends it with the process that started it."""
    return ["setpriv", "--pdeathsig=KILL", "--", *map(str, command)]


def import_path(folder: Path) -> str:
    """`PYTHONPATH` of a program that imports from a folder, before what this process has there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """One that the system gives to nobody by itself (those are above 32767), since a server takes it much later; nor
    does another process of the same run of tests get it."""
    number, count = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    step = int(count or 1)
    while True:
        port = 20_000 + step * secrets.randbelow(10_000 // step) + number
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
