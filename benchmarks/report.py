# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: arguments, tiny checkpoints, and the report, a table and with `--output` a JSON file.

The file's key `ratios` maps a name to a number, so that a script can compare two runs.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers.utils import logging

from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

Cell = str | int | float

_STARTED = time.monotonic()


@dataclass
class Report:
    """The figures of one run.

    Attributes:
        name: The benchmark.
        settings: Its arguments, and the machine.
        rows: The table; all rows have the same keys, which are its headings.
        ratios: Ours to the baseline's; the notes explain each.
        notes: Sentences that explain the table.
    """

    name: str
    settings: dict[str, Cell] = field(default_factory=dict)
    rows: list[dict[str, Cell]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_values(self, what: str, values: Sequence[float], unit: str) -> None:
        """Adds a row with the median, the least and the greatest of what was measured several times."""
        figures = {"median": percentile(values, 50), "least": min(values), "most": max(values)}
        self.rows.append({"what": what, **figures, "unit": unit})

    def finish(self, output: Path | None) -> None:
        """Prints the table, the ratios and the notes; writes all of them to `output` if that is given."""
        self.settings |= machine()
        print(f"\n{self.name}: " + ", ".join(f"{key} {value}" for key, value in self.settings.items()) + "\n")
        print(format_table(self.rows))
        if self.ratios:
            print("\n" + format_table([{"ratio": name, "value": value} for name, value in self.ratios.items()]))
        for note in self.notes:
            print(f"- {note}")
        if output is not None:
            output.write_text(json.dumps(asdict(self), indent=2) + "\n")
            print(f"written to {output}")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within minutes, and is noisier")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line. From then on transformers prints errors only."""
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return args


@contextmanager
def tiny_checkpoint(name: str, size: str = "default") -> Iterator[Path]:
    """The folder of a checkpoint with random weights. It is removed in the end, with what lies beside it."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_tiny_checkpoint(name, Path(folder) / "model", size=size)


def machine() -> dict[str, Cell]:
    """What the figures depend on, besides the code."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


def progress(text: str) -> None:
    """Prints on stderr what is running, and the seconds since the start of the program."""
    print(f"[{time.monotonic() - _STARTED:5.1f} s] {text}", file=sys.stderr, flush=True)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def underrun(segments: Sequence[tuple[float, float]]) -> float:
    """The seconds of silence for a client that plays from the first segment on.

    Args:
        segments: When each segment of sound arrived, and how many seconds it plays. At least one.
    """
    silence, played_until = 0.0, segments[0][0]
    for when, seconds in segments:
        silence += max(0.0, when - played_until)
        played_until = max(played_until, when) + seconds
    return silence


def format_table(rows: list[dict[str, Cell]]) -> str:
    """Columns as wide as they need to be; text to the left, numbers to the right."""
    if not rows:
        return "(nothing measured)"
    lines = [[*rows[0]], *([_format(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows[0]))]
    texts = [isinstance(value, str) for value in rows[0].values()]
    aligned = [
        [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ]
        for line in lines
    ]
    aligned.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def _format(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
