# SPDX-License-Identifier: Apache-2.0
"""Latency against load as PNG files. matplotlib (the extra `bench`) is imported only here."""

from collections import defaultdict
from pathlib import Path

from report import Cell, progress

MEASURES = ("TTFT", "TTFA", "RTF", "JCT")


def plot(rows: list[dict[str, Cell]], folder: Path) -> None:
    """One file for each endpoint and kind of load (open, closed): p50 as lines, p95 dashed, of everybody measured."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    charts: dict[tuple[Cell, ...], list[dict[str, Cell]]] = defaultdict(list)
    for row in rows:
        charts[row["model"], row["endpoint"], row["loop"]].append(row)
    for (model, endpoint, loop), chart in charts.items():
        path = folder / f"{model}_{endpoint}_{loop}.png"
        _draw(chart, f"{model}, {endpoint}, {loop} loop", path)
        progress(f"written {path}")


def _draw(rows: list[dict[str, Cell]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    measures = [name for name in MEASURES if any(row[f"{name} p50"] != "" for row in rows)]
    figure = Figure(figsize=(4 * len(measures), 3.4), layout="constrained")
    figure.suptitle(title)
    for axes, name in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
        _draw_measure(axes, rows, name)
    figure.savefig(path, dpi=110)


def _draw_measure(axes: "object", rows: list[dict[str, Cell]], name: str) -> None:
    for number, who in enumerate(dict.fromkeys(row["who"] for row in rows)):
        line = sorted((row for row in rows if row["who"] == who), key=lambda row: float(row["load"]))
        loads = [row["load"] for row in line]
        for percent, style in (("p50", "o-"), ("p95", "o--")):
            values = [row[f"{name} {percent}"] for row in line]
            axes.plot(loads, values, style, color=f"C{number}", label=f"{who} {percent}", markersize=3)
    axes.set_title(name if name == "RTF" else f"{name}, ms")
    axes.set_xlabel("requests at once" if rows[0]["loop"] == "closed" else "requests/s sent")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
