# SPDX-License-Identifier: Apache-2.0
"""What people see while something takes seconds: on a terminal a line that is drawn again, below the log; elsewhere one
that says what is done. Imports neither torch nor vLLM.
"""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from vllm_omni.metrics.logs import handle_import_warnings
from vllm_omni.vllm_requirement import describe_import

INTERVAL_S = 0.25
"""Between two states of the line."""
PATIENCE_S = 2.0
"""Before a wait is announced."""
_CLEAR = "\r\x1b[K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a line of it can be drawn again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def clear_line(stream: TextIO) -> None:
    """Clears the last line, for a process that ends without closing its `StatusLine`."""
    if is_terminal(stream):
        stream.write(_CLEAR)


class StatusLine:
    """The last line of a terminal, until it is closed. What vLLM's and our loggers print there is above it."""

    def __init__(self, text: Callable[[float], str], stream: TextIO) -> None:
        """
        Args:
            text: Returns the line, of the seconds since the start. Called from another thread.
        """
        self._text = text
        self._stream = stream
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_closed, name="omni-status-line", daemon=True)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(self)
                self._handlers.append(handler)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        for handler in self._handlers:
            handler.setStream(self._stream)
        self._write(_CLEAR)

    def write(self, text: str) -> None:
        """Writes lines of the log, as the stream of its handler."""
        with self._lock:
            self._write(_CLEAR + text)
            if text.endswith("\n") and not self._closing.is_set():
                self._draw()

    def flush(self) -> None:
        """Flushes the terminal, as the stream of the log's handler."""
        self._stream.flush()

    def _draw_until_closed(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._draw()

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            # The cursor is left at the start: what another process prints there replaces it.
            self._write(f"{_CLEAR}{self._text(time.monotonic() - self._start)[:width]}\r")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Reports on stderr what is done inside: on a terminal with its seconds and until it ends, elsewhere with a line if
    it takes more than two seconds."""
    if is_terminal(sys.stderr):
        with StatusLine(lambda seconds: f"{what} ... {seconds:.0f} s", sys.stderr):
            yield
        return
    timer = threading.Timer(PATIENCE_S, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def importing_vllm() -> Iterator[None]:
    """`waiting` for the first import of vLLM by a program; what that warns of, about other packages, is left out."""
    if "vllm" in sys.modules:
        yield
        return
    with handle_import_warnings(), waiting(describe_import()):
        yield
