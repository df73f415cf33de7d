# SPDX-License-Identifier: Apache-2.0
"""Python programs that start fast: forks of a process that has imported what `vllm serve` imports.

The imports take a core 15 seconds, most of what it takes to start a server. The program itself runs as an interpreter
of its own would run it, but that libraries have read the environment of this process when they were imported.
"""

import atexit
import ctypes
import functools
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

import setproctitle

from vllm_omni.orchestrator import fork_server
from vllm_omni.orchestrator.fork_server import ForkedStageProcess, ForkServer, wait_for_all

_MODULES = (
    "vllm_omni.stage.engines.llm",
    "vllm.model_executor.model_loader",
    "vllm_omni.entrypoints.openai.api_server",
)
_COMMAND = f"import sys; sys.path.insert(0, sys.argv[2]); from {__name__} import serve; serve()"
_ROOT = Path(__file__).parents[1]
_STAGES = fork_server._WORKER
_IMPORTS_S = _FOREVER_S = 600  # pytest's time limit ends a test before.
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkedProgram:
    """A program with the part of `subprocess.Popen` that tests use. Ends with this interpreter."""

    def __init__(
        self, script: Path, arguments: Sequence[object], output: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            output: The file for its standard output and standard error.
            env: Variables in addition to those of this process.
        """
        spec = {
            "argv": [str(script), *map(str, arguments)],
            "output": str(output),
            "cwd": os.getcwd(),
            "env": {**os.environ, **(env or {})},
        }
        output.write_bytes(b"")
        process = _programs().fork(json.dumps(spec).encode(), _IMPORTS_S)
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
        assert self.returncode is not None, "the process that programs are forked from died"
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ProgramServer(ForkServer):
    """Its children run programs instead of stages."""

    def _launch(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            command = [sys.executable, "-c", _COMMAND, str(server_end.fileno()), str(_ROOT), *self._modules]
            self._process = subprocess.Popen(command, pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL)


@functools.cache
def _programs() -> ForkServer:
    return _ProgramServer(_MODULES)


def serve() -> None:
    setproctitle.getproctitle()  # Locates the title's memory while the environment is the original one.
    fork_server._WORKER = __name__
    fork_server.main()


def main(spec: bytes, lifeline: socket.socket) -> None:
    """Called in the child instead of a stage's; ends the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fork_server._WORKER = _STAGES
    program = json.loads(spec)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(program["output"], os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.environ.clear()
    os.environ.update(program["env"])
    import_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(program["argv"][0]).parent), *(path for path in import_path if path not in sys.path)]
    os.chdir(program["cwd"])
    sys.argv[:] = program["argv"]
    setproctitle.setproctitle(" ".join([sys.executable, *sys.argv]))
    code, is_interrupted = 1, False
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
