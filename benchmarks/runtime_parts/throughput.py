# SPDX-License-Identifier: Apache-2.0
"""How many requests per second pass through function stages that do nothing."""

import tempfile
import time
from pathlib import Path

from report import Report, progress

from runtime_parts.pipelines import open_chain
from runtime_parts.rows import add_row
from vllm_omni import OmniLLM

LENGTHS = (1, 3)


def measure_throughput(report: Report, quick: bool) -> None:
    """Adds rows only: there is nothing to compare with."""
    rounds, count = (3, 300) if quick else (7, 1000)
    with tempfile.TemporaryDirectory() as name:
        for length in LENGTHS:
            progress(f"throughput: {length} stage(s)")
            with open_chain(Path(name), ["nothing"] * length) as llm:
                rates = [_rate(llm, count) for _ in range(1 + rounds)]
            add_row(report, f"throughput: {length} stage(s) that do nothing", rates[1:], "requests/s")


def _rate(llm: OmniLLM, count: int) -> float:
    started = time.monotonic()
    llm.generate([""] * count, use_tqdm=False)
    return count / (time.monotonic() - started)
