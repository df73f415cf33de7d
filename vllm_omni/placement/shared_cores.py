# SPDX-License-Identifier: Apache-2.0
"""How many threads a stage computes with now: its own share of the cores, and what no other stage uses.

The stages of a machine tell each other by a byte each, in a file of the pipeline's folder that all of them have mapped.
They read it between two steps, without a lock: for a step or two there can be too many threads, or too few.
"""

import mmap
import os
from pathlib import Path

from torch import get_num_threads, set_num_threads  # vLLM's CPU worker replaces the one in `torch`.

from vllm_omni.placement.spec import StagePlacement

_NUM_STAGES = 512
"""Of a larger pipeline two replicas can have the same byte, and be counted as one."""


class SharedCores:
    """What a stage process computes with. Only the engine's thread uses it."""

    def __init__(self, run_dir: Path, instance_id: int, placement: StagePlacement) -> None:
        """
        Args:
            placement: With numbers of threads. If both are the same, torch's is left as it is.
        """
        assert placement.num_threads is not None and placement.max_threads is not None
        self._least, self._most = placement.num_threads, placement.max_threads
        self._index = instance_id % _NUM_STAGES
        fd = os.open(run_dir / "threads", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, _NUM_STAGES)
            self._counts = mmap.mmap(fd, _NUM_STAGES)
        finally:
            os.close(fd)
        self.release()  # A process before this one may have died in a step.

    def take(self) -> None:
        """Has torch compute with the threads that are free. Called before each step."""
        before = self._counts[self._index]
        others = sum(self._counts[:]) - before
        number = max(self._least, self._most - others)
        self._counts[self._index] = min(number, 255)
        if self._least < self._most and number != get_num_threads():
            set_num_threads(number)

    def release(self) -> None:
        """Leaves all threads to others. Called before the engine waits."""
        self._counts[self._index] = 0
