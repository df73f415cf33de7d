# SPDX-License-Identifier: Apache-2.0
"""A terminal's last line, and the log above it."""

import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from vllm_omni.metrics import status_line
from vllm_omni.metrics.status_line import StatusLine, importing_vllm, is_terminal, waiting


class Terminal(io.StringIO):
    """Interprets what is written as a terminal does."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Its lines; the last is the one with the cursor."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):  # Each starts at the first column.
                part = part.removeprefix("\x1b[K") if (clears := part.startswith("\x1b[K")) else part
                shown = part if clears else part + shown[len(part) :]
            lines.append(shown)
        return lines


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the line was drawn."""
    monkeypatch.setattr(status_line, "INTERVAL_S", 0.001)
    return threading.Event()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """The terminal of vLLM's log."""
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield terminal
    assert handler.stream is terminal
    logger.removeHandler(handler)


def test_the_line_is_below_the_log_and_leaves_with_its_work(terminal: Terminal, drawn: threading.Event) -> None:
    def text(seconds: float) -> str:
        assert seconds >= 0
        drawn.set()
        return "loading 1 of 2"

    logger = logging.getLogger("vllm.omni.test")
    with StatusLine(text, terminal):
        assert drawn.wait(60)
        logger.error("stage 0 is ready")
        assert terminal.screen() == ["stage 0 is ready", "loading 1 of 2"]
        logger.error("stage 1 is ready")
    assert terminal.screen() == ["stage 0 is ready", "stage 1 is ready", ""]
    logger.error("after it")
    assert terminal.screen() == ["stage 0 is ready", "stage 1 is ready", "after it", ""]


def test_a_long_line_is_cut_at_the_terminals_width(
    terminal: Terminal, drawn: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    with StatusLine(lambda seconds: drawn.set() or "x" * 100, terminal):
        assert drawn.wait(60)
        logging.getLogger("vllm.omni.test").error("a line")
        assert terminal.screen() == ["a line", "x" * 29]


def test_a_dumb_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_terminal(Terminal()) and not is_terminal(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())


def test_waiting_on_a_terminal(drawn: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(StatusLine, "_write", lambda self, text: (terminal.write(text), drawn.set()))
    with waiting("importing vLLM"):
        assert drawn.wait(60)
    assert re.search(r"importing vLLM \.\.\. \d+ s", terminal.getvalue())
    assert terminal.screen() == [""]


def test_waiting_elsewhere_is_a_line_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = threading.Event()

    class File(io.StringIO):
        def write(self, text: str) -> int:
            if text.endswith("\n"):
                printed.set()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", File())
    with waiting("importing vLLM"):
        pass
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(status_line, "PATIENCE_S", 0.001)
    with waiting("importing vLLM"):
        assert printed.wait(60)
    assert sys.stderr.getvalue() == "importing vLLM ...\n"


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_program_waits_for_its_first_import_of_vllm(monkeypatch: pytest.MonkeyPatch, is_imported: bool) -> None:
    waited: list[str] = []
    monkeypatch.setattr(status_line, "waiting", lambda what: nullcontext(waited.append(what)))
    monkeypatch.setitem(sys.modules, "vllm", sys)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "vllm")
    with importing_vllm():
        pass
    assert len(waited) == (not is_imported)
