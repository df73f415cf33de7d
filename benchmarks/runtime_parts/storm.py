# SPDX-License-Identifier: Apache-2.0
"""What is left in memory of 2,000 requests of which one in five was aborted at a random moment."""

import asyncio
import os
import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import psutil
from report import Report, progress

from runtime_parts.pipelines import OMNI_ARGS, SHORT_ANSWER, write_qwen3_omni
from runtime_parts.rows import add_row
from vllm_omni import AsyncOmniLLM
from vllm_omni.events import ErrorEvent
from vllm_omni.testing.media import make_prompt

AT_ONCE = 16
ABORTED_SHARE = 0.2
QUIET_S = 30.0


def measure_storm(report: Report, quick: bool) -> None:
    """Adds `rss_after_aborts`: memory of all processes after the storm to that before; 1.05 is five percent more.

    Raises:
        RuntimeError: KV blocks, requests or payloads were left.
    """
    warm_up, count = (150, 300) if quick else (600, 2000)
    with tempfile.TemporaryDirectory() as name:
        model = write_qwen3_omni(name)
        prompts = [make_prompt(model, "text", seed) for seed in range(32)]
        progress("storm: starting")
        with AsyncOmniLLM(str(model), **OMNI_ARGS) as llm:
            progress(f"storm: {warm_up} requests to warm up")
            asyncio.run(_storm(llm, prompts, warm_up, random.Random(0)))
            before = _resident_mb()
            progress(f"storm: {count} requests")
            ends = asyncio.run(_storm(llm, prompts, count, random.Random(1)))
            after = _resident_mb()
            _check_nothing_is_held(llm)
    add_row(report, f"storm: memory before {count} requests", [before], "MB")
    add_row(report, f"storm: memory after, {ends['aborted']} of them aborted", [after], "MB")
    report.ratios["rss_after_aborts"] = after / before
    report.notes.append(
        "rss_after_aborts: after to before, below 1.05 is wanted; no KV block, request or payload is left"
    )


async def _storm(llm: AsyncOmniLLM, prompts: list[dict[str, Any]], count: int, rng: random.Random) -> Counter[str]:
    """Runs `count` requests, `AT_ONCE` at a time. Returns how many ended in which way."""
    numbers, ends = iter(range(count)), Counter[str]()
    durations = deque([1.0], maxlen=AT_ONCE)  # of the last requests that were completed, in seconds

    async def caller() -> None:
        for number in numbers:
            patience = rng.uniform(0, min(durations)) if rng.random() < ABORTED_SHARE else None
            started = time.monotonic()
            end = await _ask(llm, prompts[number % len(prompts)], patience)
            ends[end] += 1
            if end == "completed":
                durations.append(time.monotonic() - started)

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return ends


async def _ask(llm: AsyncOmniLLM, prompt: dict[str, Any], patience: float | None) -> str:
    """One request, given up after `patience` seconds."""
    try:
        return await asyncio.wait_for(_complete(llm, prompt), patience)
    except asyncio.TimeoutError:
        return "aborted"


async def _complete(llm: AsyncOmniLLM, prompt: dict[str, Any]) -> str:
    async for event in llm.generate(prompt, SHORT_ANSWER):
        if isinstance(event, ErrorEvent):
            raise event.error
    return "completed"


def _resident_mb() -> float:
    """Of this process and all below it."""
    this = psutil.Process()
    return sum(process.memory_info().rss for process in (this, *this.children(recursive=True))) / (1 << 20)


def _check_nothing_is_held(llm: AsyncOmniLLM) -> None:
    deadline = time.monotonic() + QUIET_S
    while left := _what_is_held(llm):
        if time.monotonic() > deadline:
            raise RuntimeError(f"left after the storm: {left}")
        time.sleep(0.05)


def _what_is_held(llm: AsyncOmniLLM) -> list[str]:
    held = [
        f"{stage.name}: {stage.num_running + stage.queue_depth} requests, {stage.kv_blocks_used} KV blocks"
        for stage in llm.stats()
        if stage.num_running + stage.queue_depth + stage.kv_blocks_used
    ]
    payloads = Path("/dev/shm").glob(f"vllm_omni-{os.getpid()}-*/payload-*")
    return held + [str(path) for path in payloads]
