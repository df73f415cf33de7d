# SPDX-License-Identifier: Apache-2.0
"""What a pipeline of three vLLM stages uses of a processor while nobody asks it for anything."""

import tempfile
import time

import psutil
from report import Report, progress

from runtime_parts.pipelines import OMNI_ARGS, SHORT_ANSWER, write_qwen3_omni
from runtime_parts.rows import add_row
from vllm_omni import OmniLLM
from vllm_omni.testing.media import make_prompt

SETTLE_S = 3.0


def measure_idle(report: Report, quick: bool) -> None:
    """Adds `idle_cpu`: CPU time of all the pipeline's processes to wall time; 0.01 is one percent of one core."""
    seconds = 5.0 if quick else 20.0
    with tempfile.TemporaryDirectory() as name:
        progress("idle: starting")
        model = write_qwen3_omni(name)
        with OmniLLM(str(model), **OMNI_ARGS) as llm:
            llm.generate(make_prompt(model, "text"), SHORT_ANSWER, use_tqdm=False)  # every stage has worked once
            time.sleep(SETTLE_S)
            progress(f"idle: watching for {seconds:g} s")
            before = _cpu_seconds()
            started = time.monotonic()
            time.sleep(seconds)
            share = (_cpu_seconds() - before) / (time.monotonic() - started)
    add_row(report, "idle: CPU time of three stages", [100 * share], "% of a core")
    report.ratios["idle_cpu"] = share
    report.notes.append("idle_cpu: CPU time of all processes of three vLLM stages to wall time, below 0.01 is wanted")


def _cpu_seconds() -> float:
    """Of this process and all below it."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(time.user + time.system for time in times)
