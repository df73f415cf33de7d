# SPDX-License-Identifier: Apache-2.0
"""A forked program is as one with an interpreter of its own."""

import json
import signal
from pathlib import Path

import pytest

from tests.forked_programs import ForkedProgram
from tests.orchestrator.test_failure import wait_until

pytestmark = pytest.mark.slow
SCRIPT = """
import atexit, json, os, signal, sys, threading, time
from helper import name

atexit.register(print, "at exit")
found = [__name__, name, sys.argv[1:], os.getcwd(), os.environ["MARK"], os.environ["HOME"], threading.active_count()]
print(json.dumps(found), flush=True)
print("an error", file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "raise":
    1 / 0
if sys.argv[1] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(json.loads(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper.py").write_text("name = 'beside the script'")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/of/this/test")
    return tmp_path / "script.py"


@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        (["end", "0"], 0, "at exit"),
        (["end", "3"], 3, "at exit"),
        (["end", '"a reason"'], 1, "a reason"),
        (["raise", "0"], 1, "ZeroDivisionError: division by zero"),
        (["interrupted", "0"], -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_it_runs_as_an_interpreter_runs_it(script: Path, arguments: list[str], code: int, last: str) -> None:
    program = ForkedProgram(script, arguments, script.with_name("output"), {"MARK": "1"})
    assert program.wait() == program.poll() == program.returncode == code
    first, *lines = script.with_name("output").read_text().splitlines()
    expected = ["__main__", "beside the script", arguments, str(script.parent), "1", "/of/this/test", 1]
    assert json.loads(first) == expected
    assert {"an error", "at exit", last} <= set(lines)


def test_a_signal_ends_it(script: Path) -> None:
    program = ForkedProgram(script, ["wait", "0"], script.with_name("output"), {"MARK": ""})
    wait_until(lambda: "an error" in script.with_name("output").read_text())
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
