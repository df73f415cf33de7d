# SPDX-License-Identifier: Apache-2.0
"""A small memory file system, like /dev/shm in a container."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(num_bytes: int) -> Iterator[Path]:
    """Skips the test where mounting is not permitted."""
    folder = tempfile.mkdtemp(prefix="omni-", dir="/tmp")  # sockets have short paths
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "omni-test", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(str(error))
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    finally:
        shutil.rmtree(folder)
