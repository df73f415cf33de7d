# SPDX-License-Identifier: Apache-2.0
"""The ends of the fork server, regular and others."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.forked_programs import QuickForkServer
from tests.orchestrator.pipelines import FAR
from tests.orchestrator.test_failure import wait_until
from vllm_omni.launch import fork_server
from vllm_omni.launch.fork_server import ForkServer, wait_for_all


@pytest.mark.slow
def test_it_ends_with_its_parent_and_prints_nothing(capfd: pytest.CaptureFixture) -> None:
    """Libraries warn of objects that are alive when an interpreter ends; here they are alive on purpose."""
    server = ForkServer()
    server.preload(["vllm_omni.stage.engines.llm"])
    process = server.fork(b"[]", timeout=FAR)  # It has imported everything.
    assert wait_for_all([process], timeout=FAR) == []
    process.close()
    capfd.readouterr()  # no stage at all makes no process
    server._control.close()
    assert server._process.wait() == 0
    server.close()
    output = capfd.readouterr().err
    assert "leaked" not in output and "Traceback" not in output


FORK_FROM_HERE = """
import gc, os, signal, sys, threading
from vllm_omni.launch.fork_server import ForkServer, wait_for_all

def fork_a_stage(server):
    process = server.fork(b"[]", timeout=600)
    assert wait_for_all([process], timeout=600) == []
    print(process.close())

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

server = ForkServer(["json.tool"], from_this_process=True)
assert "vllm" in sys.modules and parent_of(server._process._pid) == os.getpid()
fork_a_stage(server)
gc.collect()
sizes = dict(line.split()[:2] for line in open(f"/proc/{server._process._pid}/smaps_rollup") if line.endswith("kB\\n"))
alone = int(sizes["Private_Dirty:"]) / int(sizes["Rss:"])
assert alone < 0.2, alone  # Neither process has copied what both have imported, not even to collect garbage.
assert gc.isenabled() and gc.get_freeze_count() > 100_000
os.kill(server._process._pid, signal.SIGKILL)  # A new interpreter replaces it.
fork_a_stage(server)
assert "-c" in open(f"/proc/{server._process.pid}/cmdline").read().split("\\0")
server.close()
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""


@pytest.mark.slow
def test_a_server_that_is_forked_from_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_FROM_HERE], capture_output=True, text=True, check=True)
    ran = "ValidationError: Expected `object`, got `array`\n"  # of `worker.main`: there is no stage
    assert done.stdout == 2 * ran + "no child is left\n"


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_an_immediate_error(capfd: pytest.CaptureFixture) -> None:
    with contextlib.closing(ForkServer(preload=["vllm_omni.no_such_module"])) as server:
        with pytest.raises(EOFError, match="server that starts stage processes died"):
            server.fork(b"[]", timeout=FAR)
        assert server._process.wait() == 1
    assert "no_such_module" in capfd.readouterr().err


def test_a_reply_after_a_timeout_is_not_mistaken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stage would get the id of another process, and be killed instead of it."""
    replies: list[Any] = []

    def loads(reply: bytes) -> Any:
        replies.append(json.loads(reply))
        return replies[-1]

    with contextlib.closing(QuickForkServer()) as server:
        monkeypatch.setattr(fork_server, "json", types.SimpleNamespace(loads=loads, dumps=json.dumps))
        os.kill(server._process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            server.fork(b"[]", timeout=0.01)
        os.kill(server._process.pid, signal.SIGCONT)
        process = server.fork(b"[]", timeout=FAR)
        (_, first), (_, second) = replies
        assert process.pid == second != first
        assert wait_for_all([process], timeout=FAR) == []
        assert "ValidationError" in process.close(), "no stage at all makes no process"


def test_a_server_whose_restart_failed_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server: ForkServer) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(QuickForkServer()) as server:
        server.fork(b"[]", timeout=FAR).close()
        server._process.kill()
        server._process.wait()
        with monkeypatch.context() as patch:
            patch.setattr(QuickForkServer, "_launch", refuse)
            with pytest.raises(OSError, match="Too many open files"):
                server.fork(b"[]", timeout=FAR)
        process = server.fork(b"[]", timeout=FAR)
        assert wait_for_all([process], timeout=FAR) == []
        process.close()


def test_closing_wakes_a_thread_that_waits_for_the_server() -> None:
    with contextlib.closing(QuickForkServer()) as server, ThreadPoolExecutor(1) as threads:
        os.kill(server._process.pid, signal.SIGSTOP)
        forking = threads.submit(server.fork, b"[]", timeout=FAR)
        wait_until(server._lock.locked)
        server.close()
        with pytest.raises(EOFError, match="server that starts stage processes died"):
            forking.result()
        assert server._control.fileno() < 0
