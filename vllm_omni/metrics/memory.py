# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: as Linux and torch's allocator count it, what glibc keeps of it, and its huge pages.

To read both counts takes some 20 microseconds on a CPU.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

_STATM = "/proc/{}/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_TUNABLES = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_MADV_COLLAPSE = 25  # mman.h of Linux 6.1
_HUGE_BYTES = 2 << 20
_OWN = np.uint64(1 << 63 | 1 << 56)
"""Of a page in Linux's `pagemap`: it is in memory, and no other process has it."""


def resident_bytes(others: Sequence[int] = ()) -> int:
    """Memory in RAM of this process and of `others`, by their ids, with what they share; 0 of one that has ended."""
    pages = 0
    for process in ("self", *others):
        with suppress(FileNotFoundError, ProcessLookupError):
            pages += int(Path(_STATM.format(process)).read_text().split()[1])
    return pages * _PAGE_BYTES


def device_bytes() -> int:
    """Memory that torch's allocator holds on all devices of this process; 0 before the first. Opens no device."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.get_device_module(device).is_initialized():
        return 0
    return sum(torch.accelerator.memory_reserved(index) for index in range(torch.accelerator.device_count()))


def release_free_memory() -> None:
    """Gives back what glibc keeps between blocks that are in use; loading leaves a lot of it. Takes milliseconds.

    Does nothing with another C library.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def return_large_blocks() -> None:
    """Makes glibc return freed blocks of 1 MiB or more to the system at once, in this process. For a program's start.

    By default glibc raises this size as blocks are freed, up to 32 MiB. Media are decoded in several threads, each with
    a heap of its own, and each heap then keeps its largest size so far. Does nothing with another C library, or if the
    environment has settings for malloc.
    """
    if not any(name in os.environ for name in _TUNABLES):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def use_huge_pages() -> int:
    """Joins pages to huge ones, which programs read faster that read much memory again and again, such as weights.

    Weights are in memory of several allocators: torch's, oneDNN's, FBGEMM's. So all memory is joined that fills huge
    pages and belongs to this process alone: that takes no more of it, and shares what was shared. Takes some 0.1 s for
    500 MB.

    Returns:
        Bytes that have huge pages then; 0 on a system without.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError):  # Another system, or a container that hides the pages.
        return sum(size for start, size in _full_huge_pages() if madvise(start, size, _MADV_COLLAPSE) == 0)
    return 0


def _full_huge_pages() -> Iterator[tuple[int, int]]:
    """Addresses and sizes of memory of this process alone, all pages of which have been written to."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, mode, _, _, inode, *name = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            start, stop = -(-start // _HUGE_BYTES) * _HUGE_BYTES, stop // _HUGE_BYTES * _HUGE_BYTES
            if start >= stop or mode != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
                continue
            pagemap.seek(start // _PAGE_BYTES * 8)
            pages = np.frombuffer(pagemap.read((stop - start) // _PAGE_BYTES * 8), np.uint64)
            is_own = (pages & _OWN) == _OWN
            is_full = is_own.reshape(-1, _HUGE_BYTES // _PAGE_BYTES).all(axis=1)
            edges = np.flatnonzero(np.diff(is_full, prepend=False, append=False))
            for first, last in edges.reshape(-1, 2).tolist():
                yield start + first * _HUGE_BYTES, (last - first) * _HUGE_BYTES
