# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/process_memory.py` counts a program and its children."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

ImportBenchmark = Callable[[str], ModuleType]


def test_memory_is_that_of_all_processes(import_benchmark: ImportBenchmark) -> None:
    process_memory = import_benchmark("process_memory")
    alone = process_memory.pss_of(os.getpid())
    code = "data = bytearray(b'1' * (64 << 20)); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert process_memory.pss_of(os.getpid()) - alone > 0.064
        written = sum(mapping.written for mapping in process_memory.mappings_of(child.pid))
        assert written > 64 << 10
        assert sum(mapping.pss for mapping in process_memory.mappings_of(child.pid)) >= written
        child.kill()
