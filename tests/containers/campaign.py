# SPDX-License-Identifier: Apache-2.0
"""Pipelines that start, process requests, close and are killed at random, in two containers with one /dev/shm.

A container sees its own processes only. Its first process forks *hosts*, each the parent of one pipeline, and kills
some of them.
"""

import contextlib
import json
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.containers.namespaces import enter_own_memory, fork_container
from tests.orchestrator.pipelines import Caller, fake_stage, make_config, open_orchestrator, texts
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.launch import fork_server
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.stage import worker  # noqa: F401 (imported once, before all forks)

NUM_CONTAINERS = 2
PATIENCE_S = 60.0
MAX_HOSTS = 3
MAX_REQUESTS = 8
KILLED_SHARE = 0.7
MEMORY = Path("/dev/shm")
CONFIG = make_config(fake_stage(0, "a"), fake_stage(1, "b", (0,), "text"))


@dataclass(kw_only=True)
class Summary:
    """Counts; summaries can be added.

    Attributes:
        starts: Hosts that began to open a pipeline.
        opened: Pipelines that took requests.
        kills: Hosts that were killed, at any moment of their lives.
        closed: Pipelines that were closed in order.
        requests: Requests that were completed as they should.
        removed: Pipelines whose directory was removed while they lived.
        faults: Whatever else went wrong.
        num_left: Directories that the killed left when all processes were gone.
        left_at_end: What was in the memory file system after one more start.
    """

    starts: int = 0
    opened: int = 0
    kills: int = 0
    closed: int = 0
    requests: int = 0
    removed: int = 0
    faults: list[str] = field(default_factory=list)
    num_left: int = 0
    left_at_end: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.removed or self.faults or self.left_at_end)

    def add(self, other: "Summary") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def run(seconds: float, seed: int) -> Summary:
    """Runs the containers for some time.

    Raises:
        OSError: No namespace can be made.
    """
    return _in_process(os.fork, lambda: _run_machine(seconds, seed))


def _in_process(fork: Callable[[], int], work: Callable[[], Summary]) -> Summary:
    return _wait(*_start(fork, work))


def _start(fork: Callable[[], int], work: Callable[[], Summary]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = fork()
    if not pid:
        try:
            os.write(writer, json.dumps(asdict(work())).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    return pid, reader


def _wait(pid: int, reader: int) -> Summary:
    with open(reader, "rb") as file:
        summary = file.read()
    if os.waitpid(pid, 0)[1]:
        raise ChildProcessError("a container failed; what it wrote on stderr says why")
    return Summary(**json.loads(summary))


def _run_machine(seconds: float, seed: int) -> Summary:
    enter_own_memory()
    starts = [(fork_container, lambda i=i: Container(seed + i).run(seconds)) for i in range(NUM_CONTAINERS)]
    summary = Summary()
    for running in [_start(*start) for start in starts]:
        summary.add(_wait(*running))
    summary.num_left = len(list(MEMORY.iterdir()))
    RunDir().remove()
    summary.left_at_end = [path.name for path in MEMORY.iterdir()]
    return summary


class Container:
    """The first process of a container."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._hosts: dict[int, socket.socket] = {}
        self._killed: set[int] = set()
        self._summary = Summary()

    def run(self, seconds: float) -> Summary:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self._hosts) < MAX_HOSTS:
                self._start_host()
            time.sleep(self._rng.uniform(0, 0.2))
            if self._hosts and self._rng.random() < KILLED_SHARE:
                self._kill(self._rng.choice(list(self._hosts)))
            self._reap()
        for pid in self._hosts:
            self._kill(pid)
        deadline = time.monotonic() + PATIENCE_S
        while self._reap():  # Those that were killed leave processes, which end by themselves.
            if time.monotonic() > deadline:
                raise TimeoutError("processes of killed pipelines go on")
            time.sleep(0.01)
        return self._summary

    def _start_host(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        seed = self._rng.random()
        pid = os.fork()
        if not pid:
            ours.close()
            host(random.Random(seed), theirs)
        theirs.close()
        self._hosts[pid] = ours
        self._summary.starts += 1

    def _kill(self, pid: int) -> None:
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> bool:
        """Counts what hosts did that have ended; whether any process of the container is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid in self._hosts:
                    self._take_reports(pid, status)
        return False

    def _take_reports(self, pid: int, status: int) -> None:
        reports = []
        with self._hosts.pop(pid) as sock, contextlib.suppress(BlockingIOError):
            while report := sock.recv(1 << 16, socket.MSG_DONTWAIT):
                reports.append(report.decode())
        for report in reports:
            if report in ("opened", "closed", "requests", "removed"):
                setattr(self._summary, report, getattr(self._summary, report) + 1)
            else:
                self._summary.faults.append(report)
        if pid in self._killed:
            self._killed.remove(pid)
            self._summary.kills += 1
        elif status and "removed" not in reports:
            self._summary.faults.append(f"a host ended with {status}: {reports}")


class DirectForkServer(ForkServer):
    """Forks this process, which has imported everything, instead of starting a new one."""

    def _launch(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            self._control.close()
            with contextlib.suppress(BaseException):
                fork_server.serve(server_end)
            os._exit(0)
        server_end.close()
        self._process = fork_server._ForkedServer(pid)


def host(rng: random.Random, reports: socket.socket) -> None:
    """Opens a pipeline, submits requests, and closes it, unless the process is killed before."""
    path, made = Path(), None
    try:
        orchestrator = open_orchestrator(CONFIG, server=DirectForkServer())
        path = orchestrator._run_dir.path
        made = path.stat()
        orchestrator.wait_until_started()
        reports.send(b"opened")
        caller = Caller(orchestrator, CONFIG)
        for i in range(rng.randint(1, MAX_REQUESTS)):
            caller.submit(f"p{i}", fake_bytes=200_000, fake_seconds=rng.uniform(0, 0.2))
            assert texts(caller.wait_one()) == [f"p{i}>a>b"]
            assert is_there(path, made)
            reports.send(b"requests")
        orchestrator.close()
        assert not path.exists()
        reports.send(b"closed")
        os._exit(0)
    except BaseException:
        failure = traceback.format_exc().encode()[-10_000:]
        reports.send(failure if made is None or is_there(path, made) else b"removed")
    finally:
        os._exit(1)


def is_there(path: Path, made: os.stat_result) -> bool:
    return path.exists() and os.path.samestat(path.stat(), made)
