# SPDX-License-Identifier: Apache-2.0
"""Figures of made-up runs."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def figures():
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "figures.py")))


def test_load_has_a_line_for_each_latency_and_a_point_for_each_count(figures):
    rows = [
        {"part": "chat", "backend": backend, "concurrency": count} | dict.fromkeys(figures.METRICS, 20.0 * count)
        for backend in ("server", "direct")
        for count in (1, 4, 16)
    ]
    root = ElementTree.fromstring(figures.draw_load({"rows": rows}))
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [3, 3, 3]
    xs, ys = zip(*(map(float, point.split(",")) for point in lines[0]), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]) and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])


def test_timeline_shows_the_last_request_only(figures):
    def slice_of(request: int, kind: str, pid: int, ts: float, dur: float) -> dict:
        return {"name": f"request {request}", "cat": kind, "ph": "X", "pid": pid, "tid": 1, "ts": ts, "dur": dur}

    names = {1: "requests", 2: "stage 0: thinker", 3: "stage 1: talker"}
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in names.items()]
    for request, start in ((1, 0.0), (2, 5000.0)):
        events += [slice_of(request, "request", 1, start, 1000 * request), slice_of(request, "stage", 2, start, 500)]
        events += [slice_of(request, "stage", 3, start + 500, 500)]
        events += [{"name": "first text", "cat": "first", "ph": "i", "pid": 1, "tid": 1, "ts": start + 100}]
    root = ElementTree.fromstring(figures.draw_timeline(events))
    bars = [(float(bar.get("x")), float(bar.get("width"))) for bar in root.iter(f"{SVG}rect")]
    whole = bars[0][1]
    assert bars[1] == pytest.approx((bars[0][0], whole / 4)) and bars[2] == pytest.approx(
        (bars[0][0] + whole / 4, whole / 4)
    )
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("first text") == 1 and {"thinker", "talker", "2 ms"} <= set(texts)
