# SPDX-License-Identifier: Apache-2.0
"""`scripts/run_tests.py` ends whatever its tests do, and names what failed."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_tests.py"
CONFTEST = "from tests.conftest import pytest_runtest_teardown, pytest_sessionfinish, pytest_testnodedown\n"

NO_PLUGIN = ("-p", "no:schemathesis")
SKIPPED = "import pytest\npytest.skip('a reason', allow_module_level=True)\n"

CLOCK = """
import runpy, sys, time
from pathlib import Path

now, expires, ends = time.monotonic, Path("in_the_test"), Path("at_the_end")
begin = []

def clock():
    if not begin and (expires.exists() or ends.exists()):
        begin.append(now())
    return now() + (3600 * expires.exists() + 14 * (now() - begin[0]) if begin else 0)

time.monotonic = clock
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the script, whose limit expires when a test makes the file `in_the_test`.

What the script waits for then has a fifteenth of the time; also without the limit, by the file `at_the_end`.
"""

Run = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs two files of tests in two processes; by default the second one is skipped.

    Returns the exit code, the results, and what was printed.
    """

    def run(tests: str, others: str = SKIPPED) -> tuple[int, dict, str]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_it.py").write_text(textwrap.dedent(tests))
        (tmp_path / "test_other.py").write_text(textwrap.dedent(others))
        flags = [
            "--numprocesses=2",
            "--dist=loadfile",
            "--max-worker-restart=0",
            "-p",
            "no:schemathesis",
            "--timeout=200",
        ]
        done = subprocess.run(
            [sys.executable, "-c", CLOCK, SCRIPT, "run", "it", "--limit=10", "--budget=1", "--", *flags, *NO_PLUGIN],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        results = json.loads((tmp_path / "build/tests/it.json").read_text())
        return done.returncode, results, done.stdout

    return run


def test_what_fails_is_named_and_its_teardown_has_a_time_limit(run: Run) -> None:
    code, results, output = run("""
        import threading
        import pytest

        def test_good():
            pass

        class TestAll:
            @pytest.mark.parametrize("value", ["a-1"])
            def test_bad(self, value):
                assert value == "b"

        @pytest.fixture
        def endless():
            yield
            threading.Event().wait()

        @pytest.mark.timeout(1)
        def test_worse(endless):
            assert False
    """)
    assert code == 1
    assert results["failed"] == ["test_it.py::TestAll::test_bad[a-1]", "test_it.py::test_worse"]
    assert results["problems"] == []
    report = output[output.rindex("failed: 2") :]
    assert "planned  it" in report and report.index("slowest: 4") < report.index("times: 1")


def test_the_limit_ends_tests_that_never_return(run: Run) -> None:
    """In Python, and in C behind all signals."""
    code, results, output = run(
        """
        import threading
        from pathlib import Path

        def test_good():
            pass

        def test_endless():
            while not Path("blocks").exists():
                pass
            Path("in_the_test").touch()
            threading.Event().wait()
        """,
        """
        import ctypes, signal
        from pathlib import Path

        def test_blocking():
            Path("blocks").touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            ctypes.CDLL(None).pause()
        """,
    )
    assert code == 1
    for name in ("test_it.py::test_endless", "test_other.py::test_blocking"):
        assert f"the limit of 10 minutes expired in {name}" in results["problems"]
        assert f"{name.partition('::')[2]} (" in output  # its stack


def test_a_worker_that_dies_fails_the_run_and_its_test_is_named(run: Run) -> None:
    code, results, _ = run("""
        import os, signal

        def test_good():
            pass

        def test_fatal():
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert code == 1
    assert results["failed"] == ["test_it.py::test_fatal"]


def test_a_worker_that_dies_after_its_tests_fails_the_run(run: Run) -> None:
    code, results, _ = run("""
        import atexit, os, signal
        import pytest

        @pytest.fixture(scope="session")
        def fatal():
            yield
            os.kill(os.getpid(), signal.SIGKILL)

        def test_good(fatal):
            pass
    """)
    assert code == 1, results


def test_what_is_left_is_named_and_ended(run: Run, tmp_path: Path) -> None:
    name = f"left-by-a-test-{os.getpid()}"
    code, results, _ = run(f"""
        import os, subprocess, tempfile
        from pathlib import Path

        def test_process():
            sleep = "sleep 1000 & echo $! > pid"
            subprocess.run(["setsid", "sh", "-c", sleep], check=True)

        def test_files():
            Path("at_the_end").touch()
            Path("/dev/shm/{name}").touch()
            Path(tempfile.gettempdir(), "{name}").touch()
    """)
    assert code == 1
    pid = int((tmp_path / "pid").read_text())
    process, *files = results["problems"]
    assert process == f"left a process: {pid} sleep 1000"
    assert not psutil.pid_exists(pid)
    shared, temporary = (file.removeprefix("left a file: ") for file in files)
    assert shared == f"/dev/shm/{name}" and Path(temporary).name == name
    assert not Path(shared).exists() and not Path(temporary).exists()


def test_sigterm_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import subprocess, time
            from pathlib import Path

            def test_long():
                subprocess.run(["setsid", "sh", "-c", "sleep 1000 & echo $! > pid.new; mv pid.new pid"], check=True)
                time.sleep(1000)
        """)
    )
    command = [sys.executable, SCRIPT, "run", "it", "--limit=10", "--budget=1", "--", *NO_PLUGIN]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)  # There is no event for it.
        for _ in range(3):
            process.terminate()
    assert process.returncode == 1
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_report_names_the_tests_with_the_largest_memory(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "tests"
    folder.mkdir(parents=True)
    for name, gib in (("first", 3), ("second", 2)):
        result = {"name": name, "seconds": 1, "budget_s": 60, "peak_memory": gib << 30, "peak_tests": [f"{name}::test"]}
        (folder / f"{name}.json").write_text(json.dumps(result))
    done = subprocess.run([sys.executable, SCRIPT, "report"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("largest memory: 3.0 GiB of 10 planned, in: 1\n  first::test\n")
