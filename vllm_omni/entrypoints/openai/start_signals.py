# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C while a server starts.

A start is in the libraries of others for minutes: it downloads, imports and loads. An exception out of a signal's
handler would be raised anywhere in them, also where Python can only print it, so a thread ends the process instead.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger("vllm.omni.server")

_EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartSignals:
    """Makes a signal close the pipeline and end the process, until a running server handles signals itself.

    For the main thread.
    """

    def __init__(self) -> None:
        self._close: Callable[[], None] = lambda: None
        # Its `put` is reentrant: the handler may interrupt anything, also itself.
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="omni-start-signals", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Does not return after a signal: an error is that of a pipeline that was closed while it started."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._received.put(None)
        self._thread.join()

    def on_open(self, close: Callable[[], None]) -> None:
        """See `OmniBase`."""
        self._close = close

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received.put(number)

    def _wait(self) -> None:
        number = self._received.get()
        if number is None:
            return
        logger.error("%s: the start is interrupted", signal.Signals(number).name)
        self._close()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_EXIT_CODE)
