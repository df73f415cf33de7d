# SPDX-License-Identifier: Apache-2.0
"""Stage processes, forked from a server that has already imported vLLM.

Importing vLLM takes seconds; a fork takes milliseconds. Unlike `multiprocessing`'s fork server this one belongs to one
pipeline, ends with it, and does not run the user's main module again in every child.

Parent and server communicate over a `SOCK_SEQPACKET` socket, one request and one reply at a time; replies carry the
number of their request, so that a reply after a timeout is not mistaken for that of another request. Each child has two
socket pairs. Its *lifeline* connects it to the parent: end-of-file means that the other side is gone, and the only data
ever sent is the error of a stage that fails. The other pair connects the server to the parent: the server reaps its
children when they end, and sends their wait status. Neither the parent nor the server ever waits for a child.
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
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

from vllm_omni.metrics.logs import handle_import_warnings

_MAX_MESSAGE = 1 << 20
_head = struct.Struct("<4sI")  # verb, number
_WORKER = "vllm_omni.stage.worker"
# With the caller's import path: what the caller can import, such as a function next to its script, its stages can too.
_COMMAND = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {__name__} import main; main()"
_DIED = "the server that starts stage processes died; its stderr has the reason"


class StageProcess(Protocol):
    """The parent's handle of a stage process. No method waits.

    Attributes:
        has_ended: Whether the end of the process is known.
    """

    pid: int
    has_ended: bool

    @property
    def is_ending(self) -> bool:
        """Whether the process has sent an error, or closed its lifeline: it does not serve any more."""

    def filenos(self) -> list[int]:
        """File descriptors that become readable when `update` has something to do."""

    def update(self) -> None:
        """Reads what has been received about the end of the process."""

    def kill(self) -> None: ...

    def close(self) -> str:
        """Releases the process, whether it has ended or not; returns how it ended."""


class ForkedStageProcess(StageProcess):
    """The handle of a process on this machine."""

    def __init__(self, pid: int, lifeline: socket.socket, exit_status: socket.socket) -> None:
        """
        Args:
            lifeline: See the module.
            exit_status: Receives the wait status when the server has reaped the process.
        """
        self.pid = pid
        self.has_ended = False
        self._lifeline = lifeline
        self._exit_status = exit_status
        self._error = b""
        self._status: int | None = None

    @property
    def is_ending(self) -> bool:
        return bool(self._error) or self._lifeline.fileno() < 0

    def filenos(self) -> list[int]:
        return [sock.fileno() for sock in (self._exit_status, self._lifeline) if sock.fileno() >= 0]

    def update(self) -> None:
        # The status first: it is sent after the end, so the error has been received by then.
        status, server_is_gone = _receive(self._exit_status)
        if status:
            self._status = int(status)
        error, is_closed = _receive(self._lifeline)
        self._error += error
        self.has_ended = self._status is not None or (server_is_gone and is_closed)
        if is_closed:
            self.kill()  # Without its lifeline it would not end with its parent.

    def kill(self) -> None:
        if self._status is None:  # Once it is reaped, its id may belong to another process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> str:
        self._lifeline.close()
        self._exit_status.close()
        if self._error:
            return self._error.decode(errors="replace")
        if self._status is None:
            return "it ended" if self.has_ended else "it was killed, and has not ended yet"
        if os.WIFSIGNALED(self._status):
            return f"it was killed by {signal.Signals(os.WTERMSIG(self._status)).name}"
        return f"it exited with status {os.WEXITSTATUS(self._status)}"


def _receive(sock: socket.socket) -> tuple[bytes, bool]:
    """The data that can be received without waiting, and whether the stream has ended; then the socket is closed."""
    received = b""
    while sock.fileno() >= 0:
        try:
            chunk = sock.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return received, False
        except ConnectionError:
            chunk = b""
        received += chunk
        if not chunk:
            sock.close()
    return received, True


def wait_for_all(processes: Sequence[StageProcess], timeout: float) -> list[StageProcess]:
    """Waits until all processes have ended, for `timeout` seconds at most; returns those that have not."""
    deadline = time.monotonic() + timeout
    while True:
        for process in processes:
            process.update()
        processes = [process for process in processes if not process.has_ended]
        left = deadline - time.monotonic()
        if not processes or left <= 0:
            return list(processes)
        poller = select.poll()
        for fd in itertools.chain.from_iterable(process.filenos() for process in processes):
            poller.register(fd, select.POLLIN)
        poller.poll(left * 1000)


class ForkServer:
    """Starts the server, and forks stages from it; replaces a server that dies. For use from any thread."""

    _process: "_ServerProcess"

    def __init__(self, preload: Sequence[str] = (), *, from_this_process: bool = False) -> None:
        """
        Args:
            preload: Modules that the server imports before it forks, beside the stage shell itself.
            from_this_process: Fork the server as well, from this process, which imports these modules first: one import
                for both, and the memory of what they import is shared. For a process that does nothing else yet.
        """
        self._modules = list(preload)
        self._from_this_process = from_this_process and _can_fork()
        self._has_forked = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._launch()

    def _launch(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            if self._from_this_process:
                self._from_this_process = False  # Another one is started when this process has threads.
                self._process = _fork_server(self._control, server_end, self._modules)
                return
            import_path = json.dumps([str(entry) for entry in sys.path])
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _COMMAND, str(server_end.fileno()), import_path, *self._modules],
                    pass_fds=[server_end.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                self._control.close()
                raise

    @property
    def modules(self) -> list[str]:
        """The modules that were preloaded."""
        return self._modules

    def preload(self, modules: Sequence[str]) -> None:
        """Makes the server import further modules before it forks; does not wait for it."""
        self._modules += modules
        with contextlib.suppress(ConnectionError):  # If it has died, `fork` reports that.
            self._control.send(_head.pack(b"load", next(self._numbers)) + "\n".join(modules).encode())

    def fork(self, spec: bytes, timeout: float) -> StageProcess:
        """Forks a stage that runs `vllm_omni.stage.worker.main(spec, lifeline)`.

        Waits up to `timeout` seconds for the server to finish its imports.

        Raises:
            EOFError: The server died; its stderr has the reason. Or it was closed, also while this waits.
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
            finally:
                if self._is_closed:
                    self._end()

    def _fork(self, spec: bytes, timeout: float) -> StageProcess:
        lifeline, its_lifeline = socket.socketpair()
        exit_status, its_exit_status = socket.socketpair()
        with its_lifeline, its_exit_status, contextlib.ExitStack() as undo:
            undo.callback(lifeline.close)
            undo.callback(exit_status.close)
            try:
                pid = self._ask(b"fork", spec, timeout, [its_lifeline.fileno(), its_exit_status.fileno()])
            except ConnectionError as error:
                raise EOFError(_DIED) from error
            undo.pop_all()
        self._has_forked = True
        return ForkedStageProcess(pid, lifeline, exit_status)

    def close(self) -> None:
        """Ends the server. Stages that still run are not touched. May be called twice."""
        self._is_closed = True
        # Wakes a thread that forks, which then closes the socket: closed here, its number could be another one's.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()
        # Without waiting: the garbage collector may run this on the thread that forks.
        if self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()

    def _end(self) -> None:
        """Called with the lock."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, verb: bytes, body: bytes, timeout: float, fds: Sequence[int] = ()) -> Any:
        """The server's answer.

        Raises:
            EOFError, ConnectionError: The server died.
            TimeoutError: It did not answer in `timeout` seconds.
        """
        if self._is_closed or self._control.fileno() < 0:
            raise EOFError(_DIED)  # The next one could not be started.
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


class _ServerProcess(Protocol):
    """What a `ForkServer` needs of its server; `subprocess.Popen` has it."""

    def kill(self) -> None: ...

    def wait(self) -> Any: ...


class _ForkedServer(_ServerProcess):
    """A child of this process that is not a `Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._has_ended = False
        self._lock = threading.RLock()  # The garbage collector may close a server anywhere.

    def kill(self) -> None:
        with self._lock:
            if not self._has_ended:  # Once it is reaped, its id may belong to another process.
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        with self._lock:
            if not self._has_ended:
                with contextlib.suppress(ChildProcessError):  # Somebody else has reaped it.
                    os.waitpid(self._pid, 0)
                self._has_ended = True


def _can_fork() -> bool:
    """Whether a fork of this process works: a thread would be missing there, with the locks that it holds."""
    return sys.platform == "linux" and threading.active_count() == 1


def _fork_server(parent_end: socket.socket, server_end: socket.socket, modules: Sequence[str]) -> _ForkedServer:
    was_enabled = gc.isenabled()
    _import_all((_WORKER, *modules))
    gc.freeze()  # Before the fork, so that neither process copies what both have: see `_load`.
    pid = os.fork()
    if pid:
        if was_enabled:
            gc.enable()
        return _ForkedServer(pid)
    try:
        parent_end.close()
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
        importlib.import_module("vllm.utils.system_utils").set_process_title("fork_server", prefix="vllm_omni")
        _run(server_end, modules)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # The child must never return into its parent's code.


def serve(control: socket.socket) -> None:
    """The server's loop; returns when the parent has closed its end, or died. Belongs to the main thread."""
    _Server(control).run()


class _Server:
    """The server's process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._exit_statuses: dict[int, socket.socket] = {}  # by process id
        self._death_reader, self._death_writer = socket.socketpair()
        for sock in (self._death_reader, self._death_writer):
            sock.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._death_writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._death_reader, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._death_reader.fileno() in ready:
                self._death_reader.recv(65536)
                self._reap()
            if self._control.fileno() in ready and not self._answer():
                return

    def _answer(self) -> bool:
        """Handles a request of the parent; false if the parent is gone."""
        message, fds, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        verb, number = _head.unpack_from(message)
        body = message[_head.size :]
        if verb == b"load":
            _load(body.decode().splitlines())
        else:
            pid = self._fork_stage(body, *(socket.socket(fileno=fd) for fd in fds))
            self._control.send(json.dumps([number, pid]).encode())
        return True

    def _reap(self) -> None:
        """Sends the parent the status of each child that has ended."""
        for pid in list(self._exit_statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._exit_statuses.pop(pid) as sock, contextlib.suppress(OSError):  # The parent may be gone.
                    sock.send(str(status).encode())

    def _fork_stage(self, spec: bytes, lifeline: socket.socket, exit_status: socket.socket) -> int:
        pid = os.fork()
        if not pid:
            self._release(exit_status)
            _run_stage(spec, lifeline)
        lifeline.close()
        self._exit_statuses[pid] = exit_status
        return pid

    def _release(self, exit_status: socket.socket) -> None:
        """Closes the server's sockets in a child: kept open there, they would hide the server's end from the parent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ends = (self._control, self._death_reader, self._death_writer, exit_status, *self._exit_statuses.values())
        for sock in ends:
            sock.close()


def _import_all(modules: Sequence[str]) -> None:
    """Leaves the garbage collector off: while modules are imported it finds nothing, and takes a fifth of the time."""
    gc.disable()
    with handle_import_warnings():
        for module in modules:
            importlib.import_module(module)


def _load(modules: Sequence[str]) -> None:
    _import_all(modules)
    # Keeps the garbage collector from writing to, and so copying, the pages that children share. It does not collect
    # first either: that writes to all of them, takes most of a second, and imports leave a few MB of garbage.
    gc.freeze()
    gc.enable()


def _run_stage(spec: bytes, lifeline: socket.socket) -> NoReturn:
    status = 1
    try:
        stage = importlib.import_module(_WORKER).main(spec, lifeline)  # noqa: F841 (kept alive: see there)
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
    _run(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])


def _run(control: socket.socket, modules: Sequence[str]) -> NoReturn:
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _ending_with_parent(control):
        _load((_WORKER, *modules))
    serve(control)
    # Skips the interpreter's finalization: it cannot collect frozen objects, and libraries warn about that.
    os._exit(0)


@contextlib.contextmanager
def _ending_with_parent(control: socket.socket) -> Iterator[None]:
    """Ends this process if the parent ends during the imports, which take seconds. The thread ends before any fork."""
    stop_reader, stop_writer = os.pipe()

    def watch() -> None:
        poller = select.poll()
        poller.register(control, 0)  # POLLHUP only
        poller.register(stop_reader, select.POLLIN)
        if any(fd == control.fileno() for fd, _ in poller.poll()):
            os._exit(1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:  # Otherwise a failed import would wait for the thread, and the parent for the server.
        os.write(stop_writer, b"\0")
        thread.join()
        os.close(stop_reader)
        os.close(stop_writer)
