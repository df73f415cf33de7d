# SPDX-License-Identifier: Apache-2.0
"""The figures of the documentation, from real runs.

    python benchmarks/serve.py --parts chat --concurrency 1 2 4 8 16 --rounds 1 --output serve.json
    python scripts/figures.py load serve.json docs/figures/load.svg
    python scripts/figures.py timeline docs/figures/timeline.svg

`load` draws the latencies of the server over the number of concurrent requests. `timeline` runs the model `shapes` with
a trace file, and draws one streamed answer with speech, without other requests.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 110, 120, 20, 50
COLOURS = ("#2a78b8", "#d1652b", "#3a9456", "#8757b0")
METRICS = {"TTFT p50 ms": "first text", "TTFA p50 ms": "first sound", "E2EL p50 ms": "whole answer"}
QUESTION: list[Any] = [
    {"role": "user", "content": "Say: a red circle is left of a blue square and a small green star."}
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures = parser.add_subparsers(dest="figure", required=True)
    load = figures.add_parser("load")
    load.add_argument("report", type=Path)
    for figure in (load, figures.add_parser("timeline")):
        figure.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    drawn = draw_load(json.loads(args.report.read_text())) if args.figure == "load" else draw_timeline(record_trace())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(drawn)


def draw_load(report: dict) -> str:
    """Median latencies of `chat` through the server, on logarithmic axes: each doubling has the same length."""
    rows = [row for row in report["rows"] if row["part"] == "chat" and row["backend"] == "server"]
    counts = [row["concurrency"] for row in rows]
    values = [row[metric] for row in rows for metric in METRICS]
    x = log_scale(min(counts), max(counts), LEFT, WIDTH - RIGHT)
    y = log_scale(min(values) / 1.5, max(values) * 1.5, HEIGHT - BOTTOM, TOP)
    parts = [label(x(count), HEIGHT - BOTTOM + 18, count, "middle") for count in counts]
    parts.append(label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "concurrent requests", "middle"))
    for tick in (10, 30, 100, 300, 1000, 3000):
        if min(values) / 1.5 <= tick <= max(values) * 1.5:
            parts += [
                line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#88888855"),
                label(LEFT - 8, y(tick) + 4, f"{tick} ms"),
            ]
    for colour, (metric, name) in zip(COLOURS, METRICS.items(), strict=False):
        points = [(x(row["concurrency"]), y(row[metric])) for row in rows]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        parts.append(label(points[-1][0] + 8, points[-1][1] + 4, name, "start"))
    return as_svg(HEIGHT, parts)


def record_trace() -> list[dict]:
    """The events of one streamed answer, after another one that warms the stages up."""
    from vllm_omni import OmniLLM

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with OmniLLM("shapes", trace_file=str(path)) as llm:
            for _ in range(2):
                list(llm.chat(QUESTION, modalities=["text", "audio"], stream=True))
        return json.loads(path.read_text())


def draw_timeline(events: list[dict]) -> str:
    """The slices of the last request: one row for each stage, with the first text and the first sound."""
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    root = max((e for e in events if e.get("cat") == "request"), key=lambda e: e["ts"])
    stages = [e for e in events if e.get("cat") == "stage" and e["name"] == root["name"]]
    firsts = [e for e in events if e.get("cat") == "first" and root["ts"] <= e["ts"] <= root["ts"] + root["dur"]]
    height = 60 + 40 * (len(stages) + 1)

    def x(timestamp: float) -> float:
        return LEFT + (timestamp - root["ts"]) / root["dur"] * (WIDTH - LEFT - 40)

    parts = []
    for row, event in enumerate([root, *sorted(stages, key=lambda e: e["pid"])]):
        y, colour = 30 + 40 * row, COLOURS[row % len(COLOURS)]
        start, end = x(event["ts"]), x(event["ts"] + event["dur"])
        parts.append(label(LEFT - 8, y + 17, groups[event["pid"]].split(": ")[-1]))
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="24" rx="3" fill="{colour}"/>')
        parts.append(label(start + 6, y + 17, f"{event['dur'] / 1000:.0f} ms", "start", "#ffffff"))
    for event in firsts:
        at = x(event["ts"])
        parts += [line(at, 22, at, height - 30, "#888888"), label(at, 16, event["name"], "middle")]
    parts += [label(LEFT, height - 10, "0 ms", "middle"), label(x(root["ts"] + root["dur"]), height - 10,
              f"{root['dur'] / 1000:.0f} ms", "middle")]  # fmt: skip
    return as_svg(height, parts)


def log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from values to places."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def label(x: float, y: float, text: object, anchor: str = "end", colour: str = "#777777") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(str(text))}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def as_svg(height: int, parts: Iterable[str]) -> str:
    size, font = f'viewBox="0 0 {WIDTH} {height}"', 'font-family="sans-serif" font-size="13"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
