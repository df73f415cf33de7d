# SPDX-License-Identifier: Apache-2.0
"""Stage processes, forked from a server that has already imported vLLM.

Importing vLLM takes seconds; a fork takes milliseconds. Unlike `multiprocessing`'s fork server this one belongs to one
pipeline, ends with it, and does not run the user's main module again in every child.

Parent and server talk over a `SOCK_SEQPACKET` socket, one request and one reply at a time; replies carry the number of
their request, so that one that nobody waits for any more is not taken for another's. Each child has a *lifeline*,
a socket pair with the parent. Its end-of-file tells either side that the other is gone, however that came about; all
that is ever sent on it is the last words of a stage that fails.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

_MAX_MESSAGE = 1 << 20
_head = struct.Struct("<4sI")  # verb, number
_WORKER = "vllm_omni.stage.worker"
# With the caller's import path: what the caller can import, such as a function next to its script, its stages can too.
_COMMAND = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {__name__} import main; main()"
_LAST_WORDS_S = 2.0
_DIED = "the server that starts stage processes died; what it wrote on stderr says why"


class StageProcess:
    """A forked stage as its parent sees it. Readable (see `fileno`) when the process has ended or is about to."""

    def __init__(self, pid: int, lifeline: socket.socket, server: "ForkServer") -> None:
        self.pid = pid
        self._lifeline = lifeline
        self._server = server

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def wait(self, timeout: float) -> bool:
        """Whether the process ended within `timeout` seconds."""
        return bool(select.select([self._lifeline], [], [], max(0.0, timeout))[0])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Waits for the end of the process; says how it ended. Call once."""
        last_words = self._read_last_words()
        status = self._server.wait_for(self.pid)
        if last_words:
            return last_words
        if status is None:
            return "it ended"
        if os.WIFSIGNALED(status):
            return f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"it exited with status {os.WEXITSTATUS(status)}"

    def _read_last_words(self) -> str:
        words = b""
        with self._lifeline as lifeline, contextlib.suppress(TimeoutError):
            # A process that the stage started may hold the other end open beyond the stage's death.
            lifeline.settimeout(_LAST_WORDS_S)
            while chunk := lifeline.recv(65536):
                words += chunk
        return words.decode(errors="replace")


class ForkServer:
    """Starts the server, and forks stages from it. Starts another one, should it die. For use from any thread."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """
        Args:
            preload: Modules that the server imports before it forks, beside the stage shell itself.
        """
        self._modules = list(preload)
        self._has_forked = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._launch()

    def _launch(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            import_path = json.dumps([str(entry) for entry in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(server_end.fileno()), import_path, *self._modules],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        if self._is_closed:  # in the meantime, by somebody who could only end the one before
            self._end()
            raise EOFError(_DIED)

    def preload(self, modules: Sequence[str]) -> None:
        """Makes the server import further modules before it forks; does not wait for it."""
        self._modules += modules
        self._control.send(_head.pack(b"load", next(self._numbers)) + "\n".join(modules).encode())

    def fork(self, spec: bytes, timeout: float) -> StageProcess:
        """Forks a stage that runs `vllm_omni.stage.worker.main(spec, lifeline)`.

        Waits up to `timeout` seconds for the server to finish its imports.

        Raises:
            EOFError: The server died; what it wrote on stderr says why.
            TimeoutError: It did not finish its imports in time.
        """
        with self._lock:
            try:
                return self._fork(spec, timeout)
            except EOFError:
                if not self._has_forked or self._is_closed:
                    raise
            self._end()
            self._launch()
            return self._fork(spec, timeout)

    def _fork(self, spec: bytes, timeout: float) -> StageProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(b"fork", spec, timeout, [theirs.fileno()])
            except ConnectionError as error:
                raise EOFError(_DIED) from error
            process = StageProcess(pid, ours, self)
        self._has_forked = True
        return process

    def wait_for(self, pid: int) -> int | None:
        """The wait status of an ended stage, or None if the server is gone too."""
        if not self._lock.acquire(timeout=_LAST_WORDS_S):
            return None  # Another server is being started: the one that could know is gone.
        try:
            return self._ask(b"wait", str(pid).encode(), _LAST_WORDS_S)
        except (EOFError, OSError):
            return None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the server. Stages that still run are not touched. May be called twice."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, verb: bytes, body: bytes, timeout: float, fds: Sequence[int] = ()) -> Any:
        """The server's answer.

        Raises:
            EOFError, ConnectionError: The server died.
            TimeoutError: It did not answer in `timeout` seconds.
        """
        number = next(self._numbers)
        self._control.settimeout(max(0.001, timeout))
        socket.send_fds(self._control, [_head.pack(verb, number) + body], fds)
        while True:
            reply = self._control.recv(_MAX_MESSAGE)
            if not reply:
                raise EOFError(_DIED)
            answered, answer = json.loads(reply)
            if answered == number:
                return answer


def serve(control: socket.socket) -> None:
    """The server's loop; returns when the parent has closed its end, or died."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
        if not message:
            return
        verb, number = _head.unpack_from(message)
        body = message[_head.size :]
        if verb == b"load":
            _load(body.decode().splitlines())
            continue
        answer = _fork_stage(control, body, fds[0]) if verb == b"fork" else _wait_for(int(body))
        control.send(json.dumps([number, answer]).encode())


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    _freeze()


def _wait_for(pid: int) -> int | None:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None  # Another server's child: that one died.


def _fork_stage(control: socket.socket, spec: bytes, lifeline_fd: int) -> int:
    pid = os.fork()
    if pid:
        os.close(lifeline_fd)
        return pid
    control.close()
    lifeline = socket.socket(fileno=lifeline_fd)
    status = 1
    try:
        stages = importlib.import_module(_WORKER).main(spec, lifeline)  # noqa: F841 (see there why they are kept)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        lifeline.sendall(f"{type(error).__name__}: {error}".encode())
    finally:
        # The child must never return into the server's loop.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    with _ending_with_parent(control):
        for module in (_WORKER, *sys.argv[3:]):
            importlib.import_module(module)
    _freeze()
    serve(control)
    # Not by the interpreter's own end: it cannot take down what is frozen, and libraries complain about that.
    os._exit(0)


@contextlib.contextmanager
def _ending_with_parent(control: socket.socket) -> Iterator[None]:
    """Imports take seconds: if the parent goes meanwhile, so does this process. The watch ends before any fork."""
    stop_reader, stop_writer = os.pipe()

    def watch() -> None:
        poller = select.poll()
        poller.register(control, 0)  # for the hang-up alone
        poller.register(stop_reader, select.POLLIN)
        if any(fd == control.fileno() for fd, _ in poller.poll()):
            os._exit(1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:  # Else a failed import would wait for the thread, and the parent for the server.
        os.write(stop_writer, b"\0")
        thread.join()
        os.close(stop_reader)
        os.close(stop_writer)


def _freeze() -> None:
    """Keeps the collector from touching, and so copying, the pages that children share."""
    gc.collect()
    gc.freeze()
