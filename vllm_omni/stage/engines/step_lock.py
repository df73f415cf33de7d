# SPDX-License-Identifier: Apache-2.0
"""Lets one engine of a process work at a time, in the order in which they ask.

vLLM keeps the context of a forward in a global of its module, so two engines that step at once would read each
other's attention metadata. What guards a global of the process belongs to the process: hence `STEP_LOCK` stands here
and not in an engine. An engine that has the process to itself pays about a microsecond for it.
"""

import threading
from collections import deque


class FairLock:
    """A lock that is handed to whoever has waited longest.

    With `threading.Lock` an engine that steps without a pause takes it again before any other wakes up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_taken = False
        self._turns: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._turns.append(turn)
        turn.acquire()  # until the one before hands it over, still taken

    def __exit__(self, *exc_info: object) -> None:
        with self._mutex:
            if self._turns:
                self._turns.popleft().release()
            else:
                self._is_taken = False


STEP_LOCK = FairLock()
"""Taken around everything that touches vLLM, and never while an engine waits for work."""
