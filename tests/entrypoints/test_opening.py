# SPDX-License-Identifier: Apache-2.0
"""A pipeline that cannot be opened: the constructor raises the reason, and nothing is left of it."""

import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_run_dir import memory  # noqa: F401 (a fixture)
from tests.entrypoints.fake_pipelines import WRITER, make_pipeline
from tests.fork_server_cache import QuickForkServer, fork_server_cache
from tests.metrics.reading import scrape
from tests.orchestrator.pipelines import kept_server, make_config, open_orchestrator
from vllm_omni import OmniLLM
from vllm_omni.distributed import run_dir
from vllm_omni.entrypoints import omni_base
from vllm_omni.errors import PipelineStartError, StageStartError

TIMEOUT_S = 60.0


def with_timeout(work: Callable[[], object]) -> object:
    """The result of `work`, or its error; a constructor that blocks fails its test only."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(TIMEOUT_S)


def open_llm(tmp_path: Path) -> OmniLLM:
    return make_pipeline(OmniLLM, tmp_path / "stages.yaml", [WRITER], args={"log_stats": True})


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left(memory: Path) -> Iterator[None]:  # noqa: F811
    fork_server_cache(), kept_server()
    processes, files, threads = set(psutil.pids()), open_files(), threading.active_count()
    yield
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    assert children <= processes
    assert open_files() == files
    assert threading.active_count() == threads
    assert list(memory.iterdir()) == []
    assert scrape() == {}


@contextmanager
def file_limit(spare: int) -> Iterator[None]:
    """Limits this process to `spare` further open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] <= last:  # The limit is a file number: occupy free lower numbers.
        opened.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1] + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)


@pytest.mark.usefixtures("nothing_left")
def test_no_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "_MEMORY_FILE_SYSTEM", Path("/nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(PipelineStartError, match=r"could not be opened: .*No such file or directory.*nowhere"):
        with_timeout(lambda: open_llm(tmp_path))


@pytest.mark.usefixtures("nothing_left")
def test_a_directory_too_deep_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(run_dir, "_MEMORY_FILE_SYSTEM", deep)
    with pytest.raises(PipelineStartError, match=r"would exceed the system's limit of 107 bytes by \d+; set TMPDIR"):
        with_timeout(lambda: open_llm(tmp_path))
    assert list(deep.iterdir()) == []


@pytest.mark.usefixtures("nothing_left")
def test_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "omni-orchestrator":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(PipelineStartError, match="could not be opened: can't start new thread"):
        with_timeout(lambda: open_llm(tmp_path))


@pytest.mark.usefixtures("nothing_left")
def test_the_fork_server_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_kill() -> QuickForkServer:
        server = QuickForkServer()
        server._process.kill()
        server._process.wait(TIMEOUT_S)
        return server

    monkeypatch.setattr(omni_base, "start_fork_server", start_and_kill)
    with pytest.raises(StageStartError, match="the server that starts stage processes died"):
        with_timeout(lambda: open_llm(tmp_path))


@pytest.mark.usefixtures("nothing_left")
def test_too_few_open_files(tmp_path: Path) -> None:
    """For every small limit: libzmq aborts the process if it has no file left."""
    config = make_config(WRITER)
    for spare in range(24):
        with file_limit(spare), pytest.raises(PipelineStartError, match=r"Too many open files.*ulimit -n"):
            with_timeout(lambda: open_orchestrator(config))
    with file_limit(0), pytest.raises(PipelineStartError, match=r"Too many open files.*ulimit -n"):
        with_timeout(omni_base.start_fork_server)
    with file_limit(24 + 10):
        orchestrator = open_orchestrator(config)
        orchestrator.wait_until_started()
        orchestrator.close()
