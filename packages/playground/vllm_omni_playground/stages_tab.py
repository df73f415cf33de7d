# SPDX-License-Identifier: Apache-2.0
"""The tab with the stages at work, from `/health` and `/metrics`, and the times of the visitor's last request."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

import gradio as gr
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_playground.client import FAILURES, Server
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.stop_button import SILENT

_EVERY_S = 0.5
_SHOWN_S = 30
"""Of the load."""
_RATE_S = 2
"""Over which rates are averaged."""
_PREFIX = "vllm_omni:"
_COLOURS = (("waiting", "#fdba74"), ("to the first output", "#93b4f5"), ("working", "#2563eb"))
_STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
"""Between the marks of an axis."""
_MAX_MARKS = 5

_LOAD_AXIS = f'<div class="axis"><span>{_SHOWN_S} s ago</span><span>load</span><span>now</span></div>'
_CARDS_CSS = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 16px; }
.card { max-width: 440px; border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 12px; }
.name { display: flex; justify-content: space-between; font-weight: 600; overflow-wrap: anywhere; }
.status { font-weight: 400; color: #b45309; }
.status[data-status=ready] { color: #16a34a; }
svg { display: block; width: 100%; height: 48px; margin-top: 8px; background: var(--background-fill-secondary); }
.axis { display: flex; justify-content: space-between; border-top: 1px solid var(--border-color-primary); }
.axis, dt { color: var(--body-text-color-subdued); font-size: 0.85em; }
dl { display: grid; grid-template-columns: repeat(4, auto); gap: 4px 8px; align-items: baseline; margin: 8px 0 0; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
"""
_TIMELINE_CSS = """
.row { display: grid; grid-template-columns: minmax(90px, 14%) 1fr 60px; gap: 8px; align-items: center; }
.row > :first-child { overflow-wrap: anywhere; }
.track { position: relative; height: 22px; }
.track i { position: absolute; top: 4px; bottom: 4px; min-width: 1px; }
.track b { position: absolute; font-weight: 400; font-size: 0.85em; border-left: 1px solid; padding-left: 4px; }
.track b, p span { white-space: nowrap; }
.track b, p { color: var(--body-text-color-subdued); }
@media (max-width: 600px) { .track b:nth-child(even) { display: none; } }
"""

Values = dict[str, dict[str, float]]
"""By stage, with its replica where it has several, and by metric."""


@dataclass
class Snapshot:
    """The metrics at one time, in `time.monotonic()` seconds."""

    time: float = 0.0
    stages: Values = field(default_factory=dict)

    def is_busy(self, name: str) -> bool:
        """Whether the stage has a request."""
        values = self.stages.get(name, {})
        return values.get("num_requests_waiting", 0) + values.get("num_requests_running", 0) > 0


class StagesTab:
    """
    Attributes:
        timer: Reads the server while it is active.
    """

    def __init__(self, server: Server, last: gr.State) -> None:
        """Adds the components to the page. `last` has the visitor's `LastRequest`."""
        self._server = server
        history: gr.State = gr.State([])
        self.timer = gr.Timer(_EVERY_S, active=False)
        cards = gr.HTML(css_template=_CARDS_CSS, elem_id="stages-cards")
        note = gr.Markdown(elem_id="stages-note")
        read = self.timer.tick(self._read, history, [cards, note, history], **SILENT)
        gr.Markdown("### Your last request")
        timeline = gr.HTML(css_template=_TIMELINE_CSS, elem_id="stages-timeline")
        read.then(self._last, [last, history], timeline, **SILENT)

    async def _read(self, history: list[Snapshot]) -> tuple[Any, str, list[Snapshot]]:
        try:
            health, metrics = await self._server.get("/health"), await self._server.get("/metrics")
            metrics.raise_for_status()
            states = {stage["name"]: stage["status"] for stage in health.json()["stages"]}
        except FAILURES as error:
            return gr.skip(), f"⚠️ {self._server.explain(error)}", history
        stages = read_stages(metrics.text)
        now = Snapshot(time.monotonic(), {name: stages[name] for name in states if name in stages})  # in stage order
        history = [*(snapshot for snapshot in history if snapshot.time > now.time - _SHOWN_S), now]
        note = "" if now.stages else "The server has no metrics (`--disable-log-stats`)."
        return cards_of(states, history), note, history

    async def _last(self, last: LastRequest, history: list[Snapshot]) -> str:
        if last.is_running:
            return timeline_of(times_so_far(history, last.started))
        if not last.id:
            return "Ask for something in another tab: its way through the stages is shown here."
        try:
            answer = await self._server.get(f"/v1/pipeline/requests/{last.id}")
        except httpx2.HTTPError:
            return gr.skip()
        if answer.status_code != httpx2.codes.OK:
            return "It was not completed, or the server has forgotten it."
        return timeline_of(answer.json()["stages"])


def read_stages(text: str) -> Values:
    """The metrics of stages on a page of Prometheus metrics."""
    stages: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and sample.labels.keys() == {"pipeline", "stage", "replica"}:
                replicas = stages[sample.labels["stage"]]
                replicas[sample.labels["replica"]][sample.name.removeprefix(_PREFIX)] = sample.value
    return {
        name if len(replicas) == 1 else f"{name}.{replica}": values
        for name, replicas in stages.items()
        for replica, values in replicas.items()
    }


def duration(seconds: float) -> str:
    """Writes a time in the unit that fits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def figures(name: str, now: Snapshot, before: Snapshot) -> dict[str, str]:
    """The figures of one stage. Rates are those since the snapshot before."""
    if (values := now.stages.get(name)) is None:
        return {}
    added = _added(name, now, before)
    seconds = now.time - before.time or 1.0
    steps = added["stage_steps_total"]
    shown = {
        "running": f"{values['num_requests_running']:.0f}",
        "waiting": f"{values['num_requests_waiting']:.0f}",
        "requests/s": f"{added['stage_completed_total'] / seconds:.1f}",
        "steps/s": f"{steps / seconds:.1f}",
        "step": duration(added["stage_step_seconds_total"] / steps) if steps else "-",
        "batch": f"{added['stage_scheduled_total'] / steps:.1f}" if steps else "-",
    }
    if blocks := int(values["kv_blocks"]):
        shown["KV blocks"] = f"{values['kv_blocks_used']:.0f} of {blocks}"
    return shown


def load(name: str, now: Snapshot, before: Snapshot) -> float:
    """The share of time in which a stage computed, 0 to 1."""
    added = _added(name, now, before)
    if not added.get("stage_steps_total"):
        return float(now.is_busy(name))  # A long step is counted when it ends.
    return min(1.0, added["stage_step_seconds_total"] / (now.time - before.time))


def _added(name: str, now: Snapshot, before: Snapshot) -> dict[str, float]:
    values = now.stages.get(name, {})
    old = before.stages.get(name, values)
    return {key: max(0.0, value - old.get(key, 0.0)) for key, value in values.items()}  # a restart sets them to 0


def cards_of(states: dict[str, str], history: list[Snapshot]) -> str:
    """A card for each stage, with a line of its load."""
    now = history[-1]
    before = next(snapshot for snapshot in history if snapshot.time >= now.time - _RATE_S)
    cards = []
    for name, state in states.items():
        shown = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in figures(name, now, before).items())
        status = f'<span class="status" data-status="{escape(state)}">● {escape(state)}</span>'
        title = f'<div class="name"><span>{escape(name)}</span>{status}</div>'
        cards.append(f'<div class="card">{title}{_load_line(name, history)}{_LOAD_AXIS}<dl>{shown}</dl></div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _load_line(name: str, history: list[Snapshot]) -> str:
    now = history[-1].time
    corners = []
    for before, after in pairwise(history):
        begin, end = (f"{_SHOWN_S + moment.time - now:.2f}" for moment in (before, after))
        height = f"{1 - load(name, after, before):.2f}"
        corners += [f"{begin},{height}", f"{end},{height}"]
    if corners:
        corners = [f"{corners[0].partition(',')[0]},1", *corners, f"{_SHOWN_S},1"]
    return (
        f'<svg viewBox="0 0 {_SHOWN_S} 1" preserveAspectRatio="none"><polygon points="{" ".join(corners)}" '
        f'fill="{_COLOURS[2][1]}"/></svg>'
    )


def times_so_far(history: list[Snapshot], since: float) -> list[dict[str, Any]]:
    """When stages were seen at work since a request has started, as in `/v1/pipeline/requests/{id}`."""
    running = []
    for name in history[-1].stages if history else ():
        times = [moment.time - since for moment in history if moment.time >= since and moment.is_busy(name)]
        if times:
            first = dict.fromkeys(("arrival", "started", "first_output"), times[0])
            running.append({"name": name, **first, "finished": times[-1]})
    return running


def timeline_of(stages: list[dict[str, Any]]) -> str:
    """A picture of the times of one request, one row for each stage; see `/v1/pipeline/requests/{id}`."""
    end = max((stage["finished"] for stage in stages), default=0.0)
    if not end:
        return "It has just started."
    rows = []
    for stage in stages:
        first = stage["finished"] if stage["first_output"] is None else stage["first_output"]
        times = (stage["arrival"], stage["started"], first, stage["finished"])
        bars = "".join(
            f'<i style="left: {100 * start / end:.1f}%; width: {max(0.0, 100 * (stop - start)) / end:.1f}%; '
            f'background: {colour}" title="{what}: {duration(stop - start)}"></i>'
            for (what, colour), start, stop in zip(_COLOURS, times, times[1:], strict=False)
        )
        rows.append((escape(stage["name"]), bars, duration(stage["finished"] - stage["arrival"])))
    rows.append(("", _axis(end), ""))
    drawn = "".join(
        f'<div class="row"><span>{name}</span><div class="track">{bars}</div><span>{text}</span></div>'
        for name, bars, text in rows
    )
    legend = " · ".join(f'<span><i style="color: {colour}">■</i> {what}</span>' for what, colour in _COLOURS)
    return f"{drawn}<p>{legend}</p>"


def _axis(end: float) -> str:
    """Marks of seconds, at round numbers."""
    step = next((step for step in _STEPS_S if end / step <= _MAX_MARKS), end)
    marks = [index * step for index in range(int(end / step) + 1)]
    return "".join(f'<b style="left: {100 * mark / end:.1f}%">{mark:g} s</b>' for mark in marks)
