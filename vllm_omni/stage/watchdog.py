# SPDX-License-Identifier: Apache-2.0
"""Ends a stage's process when a step of its engine takes too long: other processes cannot detect that it hangs.

An engine records the start and end of each step, which costs about a microsecond. One thread for all engines of the
process sleeps until the first of their steps can be overdue, and without a timeout while none of them steps.

Code that holds the interpreter's lock stops that thread as well. So the thread sets a timer of faulthandler before it
sleeps, whose own thread needs no lock: it ends the process, without an error message, if the watchdog does not wake up
in time.
"""

import faulthandler
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

_STDERR = 2
COMPILE_S = 600.0
"""Additional time for a step that may compile or record something first."""


class StepTimer:
    """The time limit of an engine's steps. A context manager around each step, on the engine's thread.

    Attributes:
        label: The stage's.
        limit_s: Limit of the running or the next step, in seconds.
        deadline: When the running step is overdue; infinite while none runs.
        thread_id: The engine's thread.
    """

    def __init__(
        self,
        label: str = "",
        limit_s: float = math.inf,
        always_compiles: bool = False,
        wake_before: Callable[[float], None] | None = None,
    ) -> None:
        """
        Args:
            limit_s: For a step that compiles nothing.
            always_compiles: Any step may compile something; otherwise only the first one.
            wake_before: Called with each deadline; None: no watchdog.
        """
        self.label = label
        self.limit_s = limit_s + COMPILE_S
        self.deadline = math.inf
        self.thread_id = 0
        self._later_limit_s = self.limit_s if always_compiles else limit_s
        self._wake_before = wake_before

    def __enter__(self) -> None:
        self.thread_id = threading.get_ident()
        self.restart()

    def __exit__(self, *exc_info: object) -> None:
        self.deadline = math.inf
        self.limit_s = self._later_limit_s

    def restart(self) -> None:
        """The step has made progress: its time limit starts again."""
        if self._wake_before is not None:
            self.deadline = time.monotonic() + self.limit_s
            self._wake_before(self.deadline)


class Watchdog:
    """Watches the engines of a process.

    Attributes:
        wakes_at: When its thread checks them next; infinite: when the next step starts.
    """

    def __init__(self, exit_process: Callable[[str], NoReturn]) -> None:
        """
        Args:
            exit_process: Ends the process with this error message.
        """
        self.wakes_at = math.inf
        self._exit_process = exit_process
        self._timers: list[StepTimer] = []
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, label: str, limit_s: float, always_compiles: bool) -> StepTimer:
        """A timer for another engine. Called before `start`."""
        timer = StepTimer(label, limit_s, always_compiles, self._wake_before)
        self._timers.append(timer)
        return timer

    def start(self) -> None:
        if self._timers:
            self._thread.start()

    def _wake_before(self, deadline: float) -> None:
        if deadline < self.wakes_at:
            with self._lock:
                self._set_timer(deadline)  # Here: the step may hold the lock from its start on.
                self._is_due.set()

    def _run(self) -> None:
        while True:
            self._is_due.clear()
            self.wakes_at = math.inf  # Before the check: a step that starts meanwhile wakes it again.
            self._is_due.wait(self._check())

    def _check(self) -> float | None:
        """Ends the process if a step is overdue. Seconds until the first can be; None while none runs."""
        with self._lock:
            first = min(self._timers, key=lambda timer: timer.deadline)
            deadline = first.deadline
            if deadline == math.inf:
                faulthandler.cancel_dump_traceback_later()
                return None
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                self._end(first)
            self.wakes_at = deadline
            self._set_timer(deadline)
            return seconds

    def _set_timer(self, deadline: float) -> None:
        # Any step may hold the lock for its whole time limit.
        longest = max(timer.limit_s for timer in self._timers)
        faulthandler.dump_traceback_later(deadline - time.monotonic() + longest, exit=True, file=_STDERR)

    def _end(self, timer: StepTimer) -> NoReturn:
        message = f"{timer.label}: a step took longer than {timer.limit_s:g} s (runtime.step_timeout_s)"
        stack = "".join(traceback.format_stack(sys._current_frames()[timer.thread_id]))
        print(f"{message}; its engine is here:\n{stack}", file=sys.stderr, flush=True)
        self._exit_process(message)
