# SPDX-License-Identifier: Apache-2.0
"""A pipeline that cannot be opened: the constructor raises the reason, and nothing is left of it."""

import errno
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_run_dir import memory  # noqa: F401 (a fixture)
from tests.entrypoints.fake_pipelines import WRITER, make_pipeline
from tests.forked_programs import ForkedProgram, QuickForkServer, imported
from tests.metrics.reading import scrape
from tests.orchestrator.pipelines import kept_server, make_config, open_orchestrator
from vllm_omni import OmniLLM
from vllm_omni.distributed import run_dir
from vllm_omni.entrypoints import omni_base
from vllm_omni.errors import PipelineStartError, StageStartError


def in_a_thread(work: Callable[[], object]) -> object:
    """The result of `work`, or its error; a constructor that blocks in C does not keep pytest from ending its test."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return future.result()


def open_llm(tmp_path: Path) -> OmniLLM:
    return make_pipeline(OmniLLM, tmp_path / "stages.yaml", [WRITER], args={"log_stats": True})


def open_files() -> Counter[str]:
    """What this process has open, without what only garbage refers to."""
    gc.collect()
    files: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The folder itself was open while it was listed.
            files[os.readlink(link)] += 1
    return files


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Checks that this block leaves no process, open file, thread or metric."""
    imported(), kept_server()
    processes, files, threads, samples = set(psutil.pids()), open_files(), set(threading.enumerate()), scrape().keys()
    yield
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    assert children <= processes
    assert open_files() - files == Counter()
    assert set(threading.enumerate()) <= threads
    assert scrape().keys() <= samples


@pytest.fixture
def nothing_left(memory: Path) -> Iterator[None]:  # noqa: F811
    with leaving_nothing():
        yield
    assert list(memory.iterdir()) == []


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
def test_locks_that_the_system_refuses(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    with pytest.raises(PipelineStartError, match=r"locks in /dev/shm.* \(Read-only file system\)"):
        OmniLLM(str(tiny_qwen3))


@pytest.mark.usefixtures("nothing_left")
def test_no_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MEMORY_FILE_SYSTEM", Path("/nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(PipelineStartError, match=r"could not be opened: .*No such file or directory.*nowhere"):
        in_a_thread(lambda: open_llm(tmp_path))


@pytest.mark.usefixtures("nothing_left")
def test_a_directory_too_deep_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(run_dir, "MEMORY_FILE_SYSTEM", deep)
    with pytest.raises(PipelineStartError, match=r"would exceed the system's limit of 107 bytes by \d+; set TMPDIR"):
        in_a_thread(lambda: open_llm(tmp_path))
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
        in_a_thread(lambda: open_llm(tmp_path))


@pytest.mark.usefixtures("nothing_left")
def test_the_fork_server_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_kill() -> QuickForkServer:
        server = QuickForkServer()
        server._process.kill()
        server._process.wait()
        return server

    monkeypatch.setattr(omni_base, "start_fork_server", start_and_kill)
    with pytest.raises(StageStartError, match="the server that starts stage processes died"):
        in_a_thread(lambda: open_llm(tmp_path))


@pytest.mark.slow
def test_too_few_open_files(memory: Path, tmp_path: Path) -> None:  # noqa: F811
    """In a process of its own: libzmq aborts one that has no file left, also for another pipeline of it."""
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(f"from {__name__} import open_with_few_files\n\nopen_with_few_files()\n")
    assert ForkedProgram(program, [memory], output).wait() == 0, output.read_text()
    assert list(memory.iterdir()) == []


def open_with_few_files() -> None:
    """With every small limit."""
    run_dir.MEMORY_FILE_SYSTEM = Path(sys.argv[1])
    config = make_config(WRITER)
    with leaving_nothing():
        for spare in range(24):
            with file_limit(spare), pytest.raises(PipelineStartError, match=r"Too many open files.*ulimit -n"):
                in_a_thread(lambda: open_orchestrator(config))
        with file_limit(0), pytest.raises(PipelineStartError, match=r"Too many open files.*ulimit -n"):
            in_a_thread(omni_base.start_fork_server)
        with file_limit(24 + 10):
            orchestrator = open_orchestrator(config)
            orchestrator.wait_until_started()
            orchestrator.close()
