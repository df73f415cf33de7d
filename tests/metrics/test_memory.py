# SPDX-License-Identifier: Apache-2.0
"""Memory of this process."""

import os
import platform
from pathlib import Path

import psutil
import pytest
import torch

from vllm_omni.metrics.memory import device_bytes, resident_bytes, use_huge_pages

SIZE = 256 << 20
LINUX = tuple(map(int, platform.release().split(".")[:2])) if platform.system() == "Linux" else (0, 0)
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_huge_pages = pytest.mark.skipif(
    LINUX < (6, 1) or not ENABLED.is_file() or "[madvise]" not in ENABLED.read_text(),
    reason="the system has no huge pages, or gives them unasked",
)


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    held = torch.ones(SIZE, dtype=torch.uint8)
    assert SIZE * 0.9 < resident_bytes() - before < SIZE * 1.5
    assert abs(resident_bytes() - psutil.Process().memory_info().rss) < SIZE // 4
    del held
    assert resident_bytes() - before < SIZE // 2


def test_no_device_has_no_memory():
    if not torch.accelerator.is_available():
        assert device_bytes() == 0


@has_huge_pages
def test_huge_pages_take_no_memory_and_leave_what_is_shared() -> None:
    use_huge_pages()  # What other tests hold.
    held = torch.ones(SIZE, dtype=torch.uint8)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0)
    try:
        before, alone = resident_bytes(), huge_bytes()
        shared = use_huge_pages()
        assert shared < SIZE // 4 and huge_bytes() - alone < SIZE // 4
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)

    assert use_huge_pages() - shared > SIZE * 0.9
    assert huge_bytes() - alone > SIZE * 0.9 and resident_bytes() - before < SIZE // 8
    assert held.sum() == SIZE


def huge_bytes() -> int:
    """Of this process's memory, on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))
