# SPDX-License-Identifier: Apache-2.0
"""Fork servers that start fast: forks of a process that has imported vLLM for all tests of a session.

A fork server's imports take ten seconds of a core, longer than nearly every test that needs its own.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback

import setproctitle

from vllm_omni.orchestrator import fork_server
from vllm_omni.orchestrator.fork_server import ForkServer

_COMMAND = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {__name__} import main; main()"
_MAX_MESSAGE = 1 << 20
_SLOW_IMPORTS = ("vllm_omni.stage.engines.", "diffusers.")
"""Modules that are imported for all tests when the first one needs them."""


class QuickForkServer(ForkServer):
    """A `ForkServer` from the cache; only its start differs."""

    def _launch(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = fork_server_cache().fork(server_end, self._modules)  # type: ignore[assignment]


class ForkedProcess:
    """The part of `Popen` that `ForkServer` uses, for a process that is not a child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd: int | None = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        with self._lock:
            if self._pidfd is None:
                return
            poller = select.poll()  # `select` fails for large descriptors.
            poller.register(self._pidfd, select.POLLIN)
            assert poller.poll(None if timeout is None else 1000 * timeout), "the process did not end"
            os.close(self._pidfd)
            self._pidfd = None


class ForkServerCache:
    """The process that fork servers are forked from. Ends with the interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def fork(self, server_end: socket.socket, modules: list[str]) -> ForkedProcess:
        with self._lock:
            number = next(self._numbers)
            start = {"number": number, "path": sys.path, "environ": dict(os.environ), "modules": modules}
            with contextlib.suppress(ConnectionError):  # It has ended.
                socket.send_fds(self._control, [json.dumps(start).encode()], [server_end.fileno()])
                while answer := self._control.recv(_MAX_MESSAGE):
                    answered, pid = json.loads(answer)
                    if answered == number:  # A test's time limit may have ended the wait for an earlier one.
                        return ForkedProcess(pid)
            raise RuntimeError(f"the process that fork servers are forked from ended with {self._process.wait()}")


@functools.cache
def fork_server_cache() -> ForkServerCache:
    return ForkServerCache()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes of servers are not used
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # As in `conftest.py`.
    importlib.import_module("vllm_omni.stage.worker")
    importlib.import_module("vllm_omni.stage.engines.llm")
    setproctitle.getproctitle()  # locates the title's memory while the environment is the original one
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        start, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
        if not start:
            os._exit(0)
        start_args = json.loads(start)
        for module in start_args["modules"]:
            if module.startswith(_SLOW_IMPORTS):
                importlib.import_module(module)
        pid = os.fork()
        if not pid:
            control.close()
            become_server(start_args, fds[0])
        os.close(fds[0])
        control.send(json.dumps([start_args["number"], pid]).encode())


def become_server(start: dict, control_fd: int) -> None:
    """Runs a fork server in the caller's environment, without its imports."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(start["environ"])
    sys.path[:] = start["path"]
    status = 1
    try:
        for module in start["modules"]:
            importlib.import_module(module)
        fork_server.serve(socket.socket(fileno=control_fd))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
