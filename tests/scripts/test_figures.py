# SPDX-License-Identifier: Apache-2.0
"""What `scripts/figures.py` draws of a trace. What it draws of a report is tested in `tests/test_programs.py`."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

draw_timeline = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "figures.py"))["draw_timeline"]


def test_timeline_shows_the_last_request_only() -> None:
    def slice_of(request: int, kind: str, pid: int, ts: float, dur: float) -> dict:
        return {"name": f"request {request}", "cat": kind, "ph": "X", "pid": pid, "tid": 1, "ts": ts, "dur": dur}

    svg = "{http://www.w3.org/2000/svg}"
    names = {1: "requests", 2: "stage 0: thinker", 3: "stage 1: talker"}
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in names.items()]
    for request, start in ((1, 0.0), (2, 5000.0)):
        events += [slice_of(request, "request", 1, start, 1000 * request), slice_of(request, "stage", 2, start, 500)]
        events += [slice_of(request, "stage", 3, start + 500, 500)]
        events += [{"name": "first text", "cat": "first", "ph": "i", "pid": 1, "tid": 1, "ts": start + 100}]
    root = ElementTree.fromstring(draw_timeline(events))
    bars = [(float(bar.get("x")), float(bar.get("width"))) for bar in root.iter(f"{svg}rect")]
    whole = bars[0][1]
    assert bars[1] == pytest.approx((bars[0][0], whole / 4)) and bars[2] == pytest.approx(
        (bars[0][0] + whole / 4, whole / 4)
    )
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert texts.count("first text") == 1 and {"thinker", "talker", "2 ms"} <= set(texts)
