# SPDX-License-Identifier: Apache-2.0
"""Runs pytest so that it ends and names what failed; `make test` and `make test-slow` call it.

    python scripts/run_tests.py run NAME --limit MINUTES --budget MINUTES -- [pytest's arguments]
    python scripts/run_tests.py report [PART=SECONDS/MINUTES ...]

`run` ends pytest after its limit, with the stacks of all Python processes and the test that each was in. A test that
failed fails the run, and so do a worker process that died, and processes and files that are left. The results stand in
`build/tests`: NAME.xml (JUnit), NAME.json.

`report` prints the results of all runs in `build/tests` together, and how long each part of them took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

RESULTS = Path("build/tests")
SHARED_MEMORY = Path("/dev/shm")
MOST_MEMORY_GIB = 10
NUM_SLOWEST = 15
SUMMARY_S = 60
"""For pytest to end its processes after an interrupt, and to print what has failed."""
GRACE_S = 10
"""For processes to end after pytest."""
KEPT_BY_LIBRARIES = ("pytest-of-", "torchinductor_", "vllm_dist_", "gradio", "ray")
"""In the temporary directory: pytest's last folders, compiled code, where processes with an engine meet, what Gradio
makes when it is imported, and Ray's logs."""
WORKER_SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Sockets that vLLM's workers on another machine leave there if it dies; tests have one directory for both machines."""
MEASURE_EVERY_S = 30
"""Of the memory: to read it takes tens of milliseconds for each process."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass
class Part:
    """Of what runs one after the other."""

    name: str
    seconds: float
    budget_s: float


@dataclass
class Results(Part):
    """Of one run of pytest. Tests are named by their node ids."""

    failed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What fails the run besides its tests."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds with setup and teardown."""
    peak_memory: int = 0
    """Bytes: the largest sum of the processes' proportional set sizes seen."""
    peak_tests: list[str] = field(default_factory=list)
    """That pytest-xdist's workers were in at that moment."""


# -- run --------------------------------------------------------------------------------------------------------------


class TestRun:
    """pytest and all of its descendants, with a temporary directory of its own."""

    def __init__(self, name: str, limit_s: float, budget_s: float) -> None:
        self.results = Results(name, 0, budget_s)
        self._start = time.monotonic()
        self._limit_s = limit_s
        self._peak_measured = 0.0
        RESULTS.mkdir(parents=True, exist_ok=True)
        self._xml, self._json = (RESULTS / f"{name}.{suffix}" for suffix in ("xml", "json"))
        for path in (self._xml, self._json):
            path.unlink(missing_ok=True)

    def run(self, arguments: Sequence[str]) -> Results:
        shared_memory = set(SHARED_MEMORY.iterdir())
        # Short, because addresses of sockets are in it.
        with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as temporary:
            try:
                exit_code = self._pytest(arguments, temporary)
                if self._xml.exists():
                    self._read()
                if exit_code and not (exit_code == pytest.ExitCode.TESTS_FAILED and self.results.failed):
                    self.results.problems.append(f"pytest ended with exit code {exit_code}")
                self._wait_for_processes()
            finally:
                end_processes()
            self._look_for_files(Path(temporary), shared_memory)
        self.results.seconds = time.monotonic() - self._start
        self._json.write_text(json.dumps(asdict(self.results)))
        return self.results

    def _pytest(self, arguments: Sequence[str], temporary: str) -> int | None:
        """Its exit code; None if the limit ended it."""
        options = [f"--junitxml={self._xml}", "-o", "junit_family=xunit1"]
        environment = {**os.environ, "TMPDIR": temporary}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Rewriting assertions takes ten seconds of each process.
        command = [sys.executable, "-m", "pytest", *arguments, *options]
        with subprocess.Popen(command, env=environment) as process:
            try:
                while process.poll() is None:
                    if time.monotonic() - self._start > self._limit_s:
                        self._expire(process)
                        return None
                    self._measure()
                    reap(process.pid)
                    time.sleep(0.2)  # Nothing tells of adopted processes that have ended.
            except KeyboardInterrupt:  # From a terminal pytest has it too.
                process.wait(SUMMARY_S)
            except BaseException:
                process.kill()
                raise
        return process.returncode

    def _expire(self, process: subprocess.Popen[bytes]) -> None:
        limit = f"the limit of {self._limit_s / 60:g} minutes"
        say(f"{limit} has expired; the processes of {self.results.name}:")
        for running in descendants():
            print_stack(running)
            if test := current_test(running):
                self.results.problems.append(f"{limit} expired in {test}")
        self.results.problems = self.results.problems or [f"{limit} expired"]
        process.send_signal(signal.SIGINT)  # pytest prints what has failed so far.
        try:
            process.wait(SUMMARY_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _measure(self) -> None:
        if time.monotonic() - self._peak_measured > MEASURE_EVERY_S:
            processes = descendants()
            if (memory := sum(map(memory_of, processes))) > self.results.peak_memory:
                self.results.peak_memory = memory
                self.results.peak_tests = sorted(filter(None, map(current_test, processes)))
            self._peak_measured = time.monotonic()

    def _read(self) -> None:
        """Takes the failed tests and the seconds of all tests from the JUnit file."""
        failed, durations = set(), self.results.durations
        for case in ElementTree.parse(self._xml).iter("testcase"):  # two if the teardown failed
            test = node_id(case)
            durations[test] = durations.get(test, 0) + float(case.get("time", 0))
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(test)
        self.results.failed = sorted(failed)

    def _wait_for_processes(self) -> None:
        """Gives what still runs a moment to end, and notes what does not."""
        deadline = time.monotonic() + GRACE_S
        while (left := descendants()) and time.monotonic() < deadline:
            reap()
            time.sleep(0.2)
        self.results.problems += [f"left a process: {process.pid} {name_of(process)}" for process in left]

    def _look_for_files(self, temporary: Path, shared_memory: set[Path]) -> None:
        """Notes files of the run; in shared memory those that no other process uses."""
        left = [path for path in temporary.iterdir() if not is_kept(path)]
        new = set(SHARED_MEMORY.iterdir()) - shared_memory
        used = files_in_use(SHARED_MEMORY) if new else set()
        for path in new:
            if path.exists() and not any(path in (file, *file.parents) for file in used):
                left.append(path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.results.problems += [f"left a file: {path}" for path in sorted(left)]


def is_kept(path: Path) -> bool:
    """Whether a library leaves this in the temporary directory, and nobody can help it."""
    return path.name.startswith(KEPT_BY_LIBRARIES) or bool(WORKER_SOCKET.fullmatch(path.name) and path.is_socket())


def node_id(case: ElementTree.Element) -> str:
    """A class of tests may be another file's: what JUnit calls a class begins with the module that ran it."""
    name = case.get("name", "")
    parts = case.get("classname", "").split(".")
    for length in range(len(parts), 0, -1):
        if os.path.exists(file := "/".join(parts[:length]) + ".py"):
            return "::".join([file, *parts[length:], name])
    return name  # that of a module, which was skipped or could not be imported


# -- processes --------------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose parents end, so that none can leave the run."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_running(process)]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reap(but: int | None = None) -> None:
    """Removes the children that have ended; `but` is left to its owner."""
    with suppress(ChildProcessError):  # There are none.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                break
            os.waitpid(ended.si_pid, 0)


def end_processes() -> None:
    while left := descendants():  # Those that are killed may leave children.
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        reap()


def memory_of(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()[:300] or process.name()
    except psutil.Error:
        return "(ended)"


def current_test(process: psutil.Process) -> str | None:
    """The test that a worker process of pytest-xdist is in."""
    running = "[pytest-xdist running] "
    title = name_of(process)
    return title.removeprefix(running) if title.startswith(running) else None


def print_stack(process: psutil.Process) -> None:
    say(f"{process.pid} {name_of(process)}")
    py_spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(process.pid)]
    try:
        if "python" in Path(process.exe()).name:
            output = subprocess.run(py_spy, capture_output=True, text=True, timeout=30, check=False)
            print(output.stdout or output.stderr, flush=True)
    except (OSError, psutil.Error, subprocess.TimeoutExpired) as error:
        print(f"no stack: {error}", flush=True)


def files_in_use(folder: Path) -> set[Path]:
    """The files and folders below `folder` that processes have open or mapped; of all processes that may be read."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            names = re.findall(rf" ({folder}/\S+)", (process / "maps").read_text())
            names += [os.readlink(link) for link in (process / "fd").iterdir()]
            found.update(path for path in map(Path, names) if folder in path.parents)
    return found


# -- report -----------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Results], parts: Sequence[Part]) -> bool:
    """Prints what failed, the slowest tests and the times; returns whether all passed."""
    failed = [line for run in runs for line in (*run.failed, *(f"{run.name}: {problem}" for problem in run.problems))]
    durations = {test: seconds for run in runs for test, seconds in run.durations.items()}
    slowest = sorted(durations, key=durations.__getitem__, reverse=True)[:NUM_SLOWEST]
    peak = max(runs, key=lambda run: run.peak_memory, default=Results("", 0, 0))
    print_list("failed", failed)
    print_list("slowest", [f"{durations[test]:6.1f} s  {test}" for test in slowest])
    print_list("times", [f"{minutes(it.seconds):>6} of {minutes(it.budget_s):>6} planned  {it.name}" for it in parts])
    print_list(f"largest memory: {peak.peak_memory / 2**30:.1f} GiB of {MOST_MEMORY_GIB} planned, in", peak.peak_tests)
    return not failed


def print_list(title: str, lines: Sequence[str]) -> None:
    print(f"{title}: {len(lines) or 'none'}", *(f"  {line}" for line in lines), sep="\n", flush=True)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def say(message: str) -> None:
    print(f"==> {message}", flush=True)


def split(arguments: list[str], separator: str) -> tuple[list[str], list[str]]:
    index = arguments.index(separator) if separator in arguments else len(arguments)
    return arguments[:index], arguments[index + 1 :]


def parse_part(text: str) -> Part:
    name, _, numbers = text.partition("=")
    return Part(name, *map(float, numbers.split("/")))


def on_sigterm(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # make sends another one, which must not interrupt the end
    sys.exit("ended by SIGTERM")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run pytest under a time limit")
    run.add_argument("name", help="of the results in build/tests")
    run.add_argument("--limit", type=float, required=True, help="minutes after which it is ended")
    run.add_argument("--budget", type=float, required=True, help="minutes that it should take")
    together = commands.add_parser("report", help="print the results of all runs")
    together.add_argument("parts", nargs="*", help="NAME=SECONDS/SECONDS: how long a part took, and should take")
    own, pytest_arguments = split(sys.argv[1:], "--")
    arguments = parser.parse_args(own)
    if arguments.command == "report":
        results = [Results(**json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
        parts = [parse_part(part) for part in arguments.parts]
        total = Part("all", sum(part.seconds for part in parts), sum(part.budget_s for part in parts))
        return not report(results, [*parts, total])
    adopt_orphans()
    signal.signal(signal.SIGTERM, on_sigterm)
    results = [TestRun(arguments.name, arguments.limit * 60, arguments.budget * 60).run(pytest_arguments)]
    return not report(results, results)


if __name__ == "__main__":
    sys.exit(main())
