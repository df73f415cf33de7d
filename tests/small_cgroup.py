# SPDX-License-Identifier: Apache-2.0
"""A group of processes with little memory, like a container's."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def small_cgroup(num_bytes: int) -> Iterator[Path]:
    """A control group below that of this process: who writes a process id to its `cgroup.procs` adds the process.

    Skips the test where none can be made.
    """
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    is_v1 = "memory" in groups
    parent = _ROOT / "memory" / groups["memory"].strip("/") if is_v1 else _ROOT / groups.get("", "").strip("/")
    group = parent / f"omni-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        if not limit.exists() or not os.access(limit, os.W_OK):
            pytest.skip("control groups do not limit memory here")
        limit.write_text(str(num_bytes))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()
