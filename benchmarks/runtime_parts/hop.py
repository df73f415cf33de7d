# SPDX-License-Identifier: Apache-2.0
"""From the end of one stage's work to the start of the next one's: against a ZMQ round trip, and a copy of memory."""

import tempfile
from pathlib import Path

from report import Report, percentile, progress

from runtime_parts.bare import RoundTrip, measure_copies
from runtime_parts.pipelines import open_chain
from runtime_parts.rows import add_row, milliseconds
from vllm_omni import OmniLLM

MB = 1 << 20
SIZES = {"1mb": MB, "64mb": 64 * MB}
NOTES = (
    "a hop is from the end of one stage's function to the beginning of the next one's, in an idle pipeline; with a "
    "payload, what the first read of it takes longer than a second one is part of the hop",
    "hop_small: hop to ZMQ round trip (PUSH and PULL over ipc, two processes), below 3 is wanted",
    "hop_1mb, hop_64mb: bytes per second of the hop to those of a copy (torch, one process, both sides in memory that "
    "was in use before), above 0.4 is wanted of 64 MB",
)


def measure_hops(report: Report, quick: bool) -> None:
    """Adds `hop_small` (hop to round trip: below is better) and `hop_1mb`, `hop_64mb` (rates, hop to copy)."""
    rounds, count = (4, 100) if quick else (10, 300)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        progress("hop: starting")
        with RoundTrip(directory) as round_trip, open_chain(directory, ["send", "receive"]) as llm:
            _small(report, llm, round_trip, rounds, count)
            for label, num_bytes in SIZES.items():
                _large(report, llm, label, num_bytes, rounds, max(8, count // 10))
    report.notes += NOTES


def _small(report: Report, llm: OmniLLM, round_trip: RoundTrip, rounds: int, count: int) -> None:
    progress("hop: small messages")
    bare, ours = [], []
    for number in range(1 + rounds):
        a, b = round_trip.measure(count), _hops(llm, 0, count)
        if number:  # the first round warms up
            bare, ours = bare + a, ours + b
    add_row(report, "hop: ZMQ round trip", milliseconds(bare), "ms")
    add_row(report, "hop: small message", milliseconds(ours), "ms")
    report.ratios["hop_small"] = percentile(ours, 50) / percentile(bare, 50)


def _large(report: Report, llm: OmniLLM, label: str, num_bytes: int, rounds: int, count: int) -> None:
    progress(f"hop: {label}")
    bare, ours = [], []
    for number in range(1 + rounds):
        a, b = measure_copies(num_bytes, count), _hops(llm, num_bytes, count)
        if number:
            bare, ours = bare + a[1:], ours + b
    add_row(report, f"hop: memory copy, {label}", [num_bytes / MB / value for value in bare], "MB/s")
    add_row(report, f"hop: {label}", [num_bytes / MB / value for value in ours], "MB/s")
    report.ratios[f"hop_{label}"] = percentile(bare, 50) / percentile(ours, 50)


def _hops(llm: OmniLLM, num_bytes: int, count: int) -> list[float]:
    """Seconds of each of `count` hops, one request after the other."""
    prompt = {"prompt": "", "additional_information": {"num_bytes": num_bytes}}
    return [float(llm.generate(prompt, use_tqdm=False)[0].outputs[0].text) for _ in range(count)]
