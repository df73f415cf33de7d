# SPDX-License-Identifier: Apache-2.0
"""Python programs and fork servers that start fast: forks of a process that has imported what `vllm serve` imports.

The imports take a core 15 seconds, most of what it takes to start a server. A program itself runs as an interpreter of
its own would run it, but that libraries have read the environment of this process when they were imported.
"""

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import setproctitle

from vllm_omni.entrypoints import omni_base
from vllm_omni.launch import fork_server
from vllm_omni.launch.fork_server import ForkedStageProcess, ForkServer, wait_for_all

_MODULES = (
    "vllm_omni.stage.worker",
    "vllm_omni.stage.engines.llm",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm_omni.model_executor.models.qwen3_tts.configuration",
    "vllm_omni.entrypoints.openai.server_process",
)
_OF_ALL_TESTS = (*_MODULES, "vllm_omni.stage.engines.diffusion")
_SLOW_IMPORTS = ("vllm_omni.stage.engines.", "vllm_omni.model_executor.models.", "transformers.", "diffusers.")
"""Modules that are imported for all fork servers when the first one needs them."""
_COMMAND = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {__name__} import serve; serve()"
_STAGES = fork_server._WORKER
_IMPORTS_S = _FOREVER_S = 600  # pytest's time limit ends a test before.
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_streams: tuple[TextIO, TextIO, TextIO] | None = None
"""Of this process when it imported what its forks need."""
_imported: "_Imported | None" = None


class _Fork:
    """The part of `subprocess.Popen` that tests use, for a fork of that process."""

    def __init__(self, server: ForkServer, spec: Mapping[str, Any]) -> None:
        process = server.fork(json.dumps(spec).encode(), _IMPORTS_S)
        assert isinstance(process, ForkedStageProcess)
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        status = self._process._status
        return None if status is None else os.waitstatus_to_exitcode(status)

    def poll(self) -> int | None:
        self._process.update()
        return self.returncode

    def wait(self, timeout: float = _FOREVER_S) -> int:
        if wait_for_all([self._process], timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self._process.close()
        assert self.returncode is not None, "the process that it was forked from died"
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProgram(_Fork):
    """A program. Ends with this interpreter."""

    def __init__(
        self, script: Path, arguments: Sequence[object], output: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            output: The file for its standard output and standard error.
            env: Variables in addition to those of this process.
        """
        output.write_bytes(b"")
        argv = [str(script), *map(str, arguments)]
        env = {**os.environ, **(env or {})}
        super().__init__(imported(), {"argv": argv, "output": str(output), "cwd": os.getcwd(), "env": env})


class _ForkedForkServer(ForkServer):
    """That of a program, which has imported what it needs. As in `vllm serve`, if the program has no threads yet."""

    def __init__(self, preload: Sequence[str] = (), *, from_this_process: bool = False) -> None:
        super().__init__(preload, from_this_process=True)


class ForkedNodeServer(_Fork):
    """`python -m vllm_omni.launch.node_server LIFELINE`. Its stages are forks of it."""

    def __init__(self, its_lifeline: socket.socket) -> None:
        super().__init__(imported(), {"lifeline": True, "env": dict(os.environ)})
        socket.send_fds(self._process._lifeline, [b"lifeline"], [its_lifeline.fileno()])


class _ServerProcess(_Fork):
    """The process of a fork server, which two threads may end at once."""

    def __init__(self, server: ForkServer, spec: Mapping[str, Any]) -> None:
        super().__init__(server, spec)
        self._lock = threading.RLock()

    def wait(self, timeout: float = _FOREVER_S) -> int:
        with self._lock:
            return super().wait(timeout)

    def send_signal(self, sig: int) -> None:
        with self._lock:
            super().send_signal(sig)


class QuickForkServer(ForkServer):
    """A `ForkServer` that is itself a fork; only its start differs."""

    def preload(self, modules: Sequence[str]) -> None:
        if _import_slow(modules) and not self._has_forked:
            with self._lock:
                self._end()
                self._launch()
        super().preload(modules)

    def _launch(self) -> None:
        _import_slow(self._modules)
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            process = _ServerProcess(imported(), {"modules": self._modules, "path": sys.path, "env": dict(os.environ)})
            socket.send_fds(process._process._lifeline, [b"control"], [server_end.fileno()])
        self._process = process


def _import_slow(modules: Sequence[str]) -> bool:
    """Imports what takes long for all fork servers; whether that is news."""
    missing = [it for it in modules if it.startswith(_SLOW_IMPORTS) and it not in imported().modules]
    if missing:
        imported().preload(missing)
    return bool(missing)


class _Imported(ForkServer):
    """The process that all are forked from."""

    def _launch(self) -> None:
        if self._from_this_process:
            with mock.patch.object(fork_server, "_WORKER", __name__):
                super()._launch()
            return
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            command = [sys.executable, "-c", _COMMAND, str(server_end.fileno()), json.dumps(sys.path), *self._modules]
            self._process = subprocess.Popen(command, pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL)


def import_for_tests() -> None:
    """Imports what most tests of a whole run need; `imported` is then a fork of this process, which saves its imports.
    For a process that has done nothing else yet, and with the streams that programs have."""
    global _streams
    _streams = sys.stdin, sys.stdout, sys.stderr
    fork_server._import_all(_OF_ALL_TESTS)
    _inspect_models_here()


def _inspect_models_here() -> None:
    """vLLM has a new Python import each architecture that its cache on this machine does not know, or knows of another
    version: 15 seconds of a core. That keeps CUDA uninitialized in this process."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()


def imported() -> ForkServer:
    """Starts it at the first call. Ends with this interpreter."""
    global _imported
    if _imported is None:
        is_here = _streams is not None
        _imported = _Imported(_OF_ALL_TESTS if is_here else _MODULES, from_this_process=is_here)
    return _imported


def serve() -> None:
    setproctitle.getproctitle()  # Locates the title's memory while the environment is the original one.
    fork_server._WORKER = __name__
    fork_server.main()


def main(spec: bytes, lifeline: socket.socket) -> None:
    """Called in the child instead of a stage's; ends the process."""
    fork_server._WORKER = _STAGES
    if _streams is not None:
        _forget_pytest(*_streams)
    arguments = json.loads(spec)
    os.environ.clear()
    os.environ.update(arguments["env"])
    if "argv" in arguments:
        _run_program(**arguments)
    elif "lifeline" in arguments:
        _run_node_server(lifeline)
    else:
        _run_server(lifeline, arguments["modules"], arguments["path"])


def _forget_pytest(*streams: TextIO) -> None:
    """What pytest has replaced is as in an interpreter of its own."""
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    faulthandler.disable()
    setproctitle.setproctitle(sys.executable)


def _run_server(lifeline: socket.socket, modules: Sequence[str], import_path: Sequence[str]) -> None:
    _, (control,), _, _ = socket.recv_fds(lifeline, 64, 1)
    sys.path[:] = import_path
    for module in modules:
        importlib.import_module(module)
    fork_server.serve(socket.socket(fileno=control))
    os._exit(0)


def _run_node_server(lifeline: socket.socket) -> None:
    from vllm_omni.launch import node_server

    _, (its_end,), _, _ = socket.recv_fds(lifeline, 64, 1)
    node_server.ForkServer = _ForkedForkServer  # type: ignore[misc]
    sys.argv[1:] = [str(its_end)]
    node_server.main()


def _run_program(argv: Sequence[str], output: str, cwd: str, env: Mapping[str, str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.close(file)
    import_path = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.path[:0] = [str(Path(argv[0]).parent), *(path for path in import_path if path not in sys.path)]
    os.chdir(cwd)
    sys.argv[:] = argv
    setproctitle.setproctitle(" ".join([sys.executable, *sys.argv]))
    code, is_interrupted = 1, False
    omni_base.ForkServer = _ForkedForkServer  # type: ignore[misc]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else bool(exit.code)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        traceback.print_exc()
    finally:
        # What the interpreter does at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)
