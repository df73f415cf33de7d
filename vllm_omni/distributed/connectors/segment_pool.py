# SPDX-License-Identifier: Apache-2.0
"""Shared memory that a sender reuses.

Fresh memory costs several times what the copy into it does, because the system allocates, clears and maps each page. A
segment is a file that its sender keeps. A payload in it has a name of its own, a hard link, which the receiver removes
when it receives the payload; while the receiver uses the memory, it holds a shared lock on the file. So a segment is
free when it has one name and no lock: no message is needed, and a dead receiver holds nothing.
"""

import errno
import fcntl
import itertools
import mmap
import os
import weakref
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
from vllm.utils.math_utils import round_up

_MAX_BYTES = 256 << 20
_FILE_SYSTEM_SHARE = 32
_MAX_WASTE = 4
_NUM_LOOKED_UP = 4
_NUM_UNUSED_TAKES = 1000
"""A free segment that was not used for this many payloads is removed."""


class Segment:
    """A file of `capacity` reserved bytes. Its own name is removed with the last reference to the object."""

    def __init__(self, path: str, capacity: int) -> None:
        """
        Raises:
            OSError: There is no room.
        """
        self.capacity = capacity
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._memory: np.ndarray | None = None  # uint8 [capacity]
        self.remove = weakref.finalize(self, _remove, self._fd, path)
        self.remove.atexit = False  # A fork of this process must not run it; the run directory is removed as a whole.
        try:
            # Reserve the pages now: a full file system is an error here, not a SIGBUS while copying. Check first: the
            # system would allocate all that is left before it fails. (A file system of 0 blocks has no limit.)
            room = os.fstatvfs(self._fd)
            if room.f_blocks and room.f_bavail * room.f_frsize < capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            os.posix_fallocate(self._fd, 0, capacity)
        except BaseException:
            self.remove()
            raise

    @property
    def is_free(self) -> bool:
        if os.fstat(self._fd).st_nlink > 1:
            return False  # The payload was not received yet.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def map(self) -> None:
        """Speeds up writing. Mapping pages that were never written would cost more than it saves."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(self._fd, self.capacity), dtype=np.uint8)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Copies a buffer of bytes to an offset; releases the GIL."""
        if self._memory is not None:
            np.copyto(self._memory[offset : offset + buffer.nbytes], np.frombuffer(buffer, dtype=np.uint8))
            return
        while buffer.nbytes:
            written = os.pwrite(self._fd, buffer, offset)
            buffer, offset = buffer[written:], offset + written

    def publish(self, path: str) -> None:
        """Links the file under the name that the receiver opens."""
        os.link(self._path, path)


class _FreeSegment(NamedTuple):
    """`since`: the number of the `take` call that found it free."""

    segment: Segment
    since: int


class SegmentPool:
    """One sender's segments, with the names `directory/prefix-*`.

    Only the sender fills a segment, so one that was found free stays free. Each payload checks the next few of the
    others, in turn: the cost of a payload does not depend on their number.
    """

    def __init__(self, directory: Path, prefix: str, max_bytes: int | None = None) -> None:
        """
        Args:
            max_bytes: Bytes to keep; default: 256 MiB, at most 1/32 of the file system.
        """
        self._path = str(directory / prefix)
        self._counter = itertools.count()
        self._num_takes = 0
        self._num_bytes = 0  # of the segments that are kept
        self._sent: deque[Segment] = deque()
        self._free: defaultdict[int, deque[_FreeSegment]] = defaultdict(deque)  # by capacity; in order of `since`
        if max_bytes is None:
            file_system = os.statvfs(directory)
            max_bytes = min(_MAX_BYTES, file_system.f_blocks * file_system.f_frsize // _FILE_SYSTEM_SHARE)
        self._max_bytes = max_bytes

    def take(self, size: int) -> Segment:
        """A segment with room for `size` bytes. Publish it, or drop it, before the next call.

        Raises:
            OSError: There is no room.
        """
        self._num_takes += 1
        self._look_up(_NUM_LOOKED_UP)
        self._drop_unused()
        # Rounded up by at most a quarter, so that payloads of similar size fit the same segments.
        capacity = round_up(size, 1 << max(16, size.bit_length() - 3))
        fitting = [c for c, segments in self._free.items() if segments and size <= c <= _MAX_WASTE * capacity]
        if fitting:
            segment = self._free[min(fitting)].pop().segment
            segment.map()
        elif self._make_room(capacity):
            segment = self._new(capacity)
            self._num_bytes += capacity
        else:
            return self._new(size)
        self._sent.append(segment)
        return segment

    def _look_up(self, count: int) -> None:
        """Checks which of the next `count` segments that were sent are free."""
        for _ in range(min(count, len(self._sent))):
            segment = self._sent.popleft()
            if segment.is_free:
                self._free[segment.capacity].append(_FreeSegment(segment, self._num_takes))
            else:
                self._sent.append(segment)

    def _drop_unused(self) -> None:
        """Frees memory that a burst of payloads needed."""
        for segments in self._free.values():
            while segments and segments[0].since < self._num_takes - _NUM_UNUSED_TAKES:
                self._drop(segments)

    def _make_room(self, capacity: int) -> bool:
        """Whether `capacity` more bytes can be kept; drops free segments, which did not fit, for that."""
        room = self._max_bytes - self._num_bytes
        if room + sum(capacity * len(segments) for capacity, segments in self._free.items()) < capacity:
            return False
        for segments in self._free.values():
            while segments and self._max_bytes - self._num_bytes < capacity:
                self._drop(segments)
        return True

    def _new(self, capacity: int) -> Segment:
        path = f"{self._path}-{next(self._counter)}"
        try:
            return Segment(path, capacity)
        except OSError:
            self._look_up(len(self._sent))
            if not any(self._free.values()):
                raise
        for segments in self._free.values():
            while segments:
                self._drop(segments)
        return Segment(path, capacity)

    def _drop(self, segments: deque[_FreeSegment]) -> None:
        """Removes the least recently used one."""
        segment = segments.popleft().segment
        self._num_bytes -= segment.capacity
        segment.remove()


def _remove(fd: int, path: str) -> None:
    os.close(fd)
    Path(path).unlink(missing_ok=True)
