# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, as Linux and torch's allocator count it, and what glibc keeps of it.

To read both counts takes some 20 microseconds on a CPU.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

_STATM = "/proc/{}/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_TUNABLES = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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
