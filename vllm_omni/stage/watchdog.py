# SPDX-License-Identifier: Apache-2.0
"""Ends a stage's process when its work takes too long: other processes cannot detect that it hangs.

The engine's thread records the start and end of each step, and of taking in a request, which may encode an image; the
IO thread those of each wake-up, in which stage input processors run. That costs about a microsecond. One thread for all
of a process sleeps until the first of them can be overdue, and without a timeout while nothing runs.

Code that holds the interpreter's lock stops that thread as well. So the thread sets a timer of faulthandler before it
sleeps, whose own thread needs no lock: it ends the process, without an error message, if the watchdog does not wake up
in time.
"""

import contextlib
import faulthandler
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import NoReturn

_STDERR = 2
COMPILE_S = 600.0
"""Additional time for the first work of a kind or shape: it may compile, record or load something."""
TIMEOUT_OPTION = "runtime.step_timeout_s"
STEP = "a step"
INTAKE = "taking in a request"
IO = "the work of the IO thread"
INPUT = "the stage input processor"


class StepTimer:
    """The time limit of one thread's work: an engine's steps and its intake, or what an IO thread does at a wake-up.

    A context manager around each step, and `of` for other work. Work inside other work has a limit of its own; then
    that of the outer one starts again.

    Attributes:
        label: The stage's.
        what: The running or the next work.
        limit_s: Its limit in seconds.
        deadline: When the running work is overdue; infinite while none runs.
        thread_id: The thread.
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
            limit_s: For work that compiles nothing.
            always_compiles: Any step may compile something; otherwise only the first one of each shape.
            wake_before: Called with each deadline; None: no watchdog.
        """
        self.label = label
        self.deadline = math.inf
        self.thread_id = 0
        self._base_limit_s = limit_s
        self._always_compiles = always_compiles
        self._wake_before = wake_before
        self._running: list[tuple[str, Hashable]] = []
        self._known: set[tuple[str, Hashable]] = set()
        self._set_limit((STEP, None))

    def __enter__(self) -> None:
        self._begin(STEP)

    def __exit__(self, *exc_info: object) -> None:
        key = self._running.pop()
        self._known.add(key)
        if self._running:
            self.restart()
        else:
            self.deadline = math.inf
            self._set_limit(key)

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Around other work than a step."""
        self._begin(what)
        with contextlib.ExitStack() as stack:
            stack.push(self.__exit__)
            yield

    def _begin(self, what: str) -> None:
        self.thread_id = threading.get_ident()
        self._running.append((what, None))
        self.restart()

    def more_s(self, what: str) -> float:
        """Seconds that work of a kind, before it starts, may take in addition to the time limit."""
        return COMPILE_S if self._wake_before is not None and (what, None) not in self._known else 0.0

    def set_shape(self, shape: Hashable) -> None:
        """The running step computes something of this shape: if it is the first, it has more time."""
        if self._running and (key := (self._running[-1][0], shape)) not in self._known:
            self._known.add(self._running[-1])
            self._running[-1] = key
            self.restart()

    def restart(self) -> None:
        """The work has made progress: its time limit starts again."""
        self._set_limit(self._running[-1])
        if self._wake_before is not None:
            self.deadline = time.monotonic() + self.limit_s
            self._wake_before(self.deadline)

    def _set_limit(self, key: tuple[str, Hashable]) -> None:
        self.what = key[0]
        may_compile = key not in self._known or (self._always_compiles and self.what == STEP)
        self.limit_s = self._base_limit_s + (COMPILE_S if may_compile else 0.0)


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
        self._longest_s = 0.0  # with which faulthandler's timer was set
        self._exit_process = exit_process
        self._timers: list[StepTimer] = []
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, label: str, limit_s: float, always_compiles: bool) -> StepTimer:
        """A timer for another thread. Called before `start`."""
        timer = StepTimer(label, limit_s, always_compiles, self._wake_before)
        self._timers.append(timer)
        return timer

    def start(self) -> None:
        if self._timers:
            self._thread.start()

    def _wake_before(self, deadline: float) -> None:
        if deadline < self.wakes_at or self._longest() != self._longest_s:
            with self._lock:
                # Here: the step may hold the lock from its start on.
                self._set_timer(min(deadline, self.wakes_at))
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

    def _longest(self) -> float:
        """Any work may hold the lock for its whole time limit."""
        return max(timer.limit_s for timer in self._timers)

    def _set_timer(self, deadline: float) -> None:
        self._longest_s = self._longest()
        seconds = max(0.0, deadline - time.monotonic()) + self._longest_s
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)

    def _end(self, timer: StepTimer) -> NoReturn:
        message = f"{timer.label}: {timer.what} took longer than {timer.limit_s:g} s ({TIMEOUT_OPTION})"
        stack = "".join(traceback.format_stack(sys._current_frames()[timer.thread_id]))
        print(f"{message}; it is here:\n{stack}", file=sys.stderr, flush=True)
        self._exit_process(message)
