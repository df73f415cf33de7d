# SPDX-License-Identifier: Apache-2.0
"""Waking a thread that sleeps in a poll."""

import contextlib
import os


class WakeUp:
    """Readable from `set`, on any thread, until `clear`, on the thread that polls it.

    Not a pipe or a socket: the kernel takes a write to one for the writer's last act before it sleeps, and may put the
    reader on the writer's core. Where the writer works on, such as an engine, the reader waits for its time slice to
    end, up to 3 ms.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """-1 after `close`, as of a socket."""
        return self._fd

    def set(self) -> None:
        """
        Raises:
            ValueError: It is closed.
        """
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # It was not set.
            os.eventfd_read(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # Another thread must not write to the next file with this number.
        os.close(fd)
