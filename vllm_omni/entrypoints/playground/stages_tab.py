# SPDX-License-Identifier: Apache-2.0
"""The tab with the stages at work, from `/health` and `/metrics`, and the times of the visitor's last request."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni.entrypoints.playground.chat_tab import Conversation
from vllm_omni.entrypoints.playground.client import FAILURES, Server

HEADERS = ["stage", "state", "waiting", "running", "requests/s", "steps/s", "ms/step", "batch", "KV blocks"]
_EVERY_S = 1.0
_PREFIX = "vllm_omni:"
_COLOURS = (("waiting", "#fdba74"), ("to the first output", "#a8c7fa"), ("working", "#0b57d0"))
_WIDTH, _LABEL, _ROW = 640, 120, 22

Values = dict[str, dict[str, float]]
"""By stage, with its replica where it has several, and by metric."""


@dataclass
class Snapshot:
    """The metrics at one time, in `time.monotonic()` seconds."""

    time: float = 0.0
    stages: Values = field(default_factory=dict)


class StagesTab:
    """
    Attributes:
        timer: Reads the server while it is active.
    """

    def __init__(self, server: Server, conversation: gr.State | None) -> None:
        """Adds the components to the page.

        Args:
            conversation: That of the chat, if the page has one.
        """
        self._server = server
        previous = gr.State(Snapshot())
        self.timer = gr.Timer(_EVERY_S, active=False)
        table = gr.Dataframe(headers=HEADERS, interactive=False, elem_id="stages-table", show_label=False)
        note = gr.Markdown(elem_id="stages-note")
        self.timer.tick(self._read, previous, [table, note, previous], show_progress="hidden", api_visibility="private")
        if conversation is not None:
            gr.Markdown("### Your last request")
            timeline = gr.HTML(elem_id="stages-timeline")
            self.timer.tick(self._last, conversation, timeline, show_progress="hidden", api_visibility="private")

    async def _read(self, previous: Snapshot) -> tuple[Any, str, Snapshot]:
        try:
            health, metrics = await self._server.get("/health"), await self._server.get("/metrics")
            metrics.raise_for_status()
            states = {stage["name"]: stage["status"] for stage in health.json()["stages"]}
        except FAILURES as error:
            return gr.skip(), f"⚠️ {self._server.explain(error)}", previous
        now = Snapshot(time.monotonic(), read_stages(metrics.text))
        note = "" if now.stages else "The server has no metrics (`--disable-log-stats`)."
        return [table_row(name, states[name], now, previous) for name in states], note, now

    async def _last(self, conversation: Conversation) -> str:
        if not conversation.last_id:
            return "None was completed."
        try:
            answer = await self._server.get(f"/v1/pipeline/requests/{conversation.last_id}")
        except httpx2.HTTPError:
            return gr.skip()
        if answer.status_code != httpx2.codes.OK:
            return "It is not complete, or the server has forgotten it."
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


def table_row(name: str, state: str, now: Snapshot, before: Snapshot) -> list[Any]:
    """One stage, in the order of `HEADERS`. Rates are those since the snapshot before."""
    values = now.stages.get(name)
    if values is None:
        return [name, state, *[""] * (len(HEADERS) - 2)]
    old = before.stages.get(name, values)
    added = {key: max(0.0, value - old.get(key, 0.0)) for key, value in values.items()}  # a restart sets them to 0
    seconds = now.time - before.time
    steps = added["stage_steps_total"]
    blocks = int(values["kv_blocks"])
    return [
        name,
        state,
        int(values["num_requests_waiting"]),
        int(values["num_requests_running"]),
        round(added["stage_completed_total"] / seconds, 1),
        round(steps / seconds, 1),
        round(1000 * added["stage_step_seconds_total"] / steps, 1) if steps else "",
        round(added["stage_scheduled_total"] / steps, 1) if steps else "",
        f"{int(values['kv_blocks_used'])} of {blocks}" if blocks else "",
    ]


def timeline_of(stages: list[dict[str, Any]]) -> str:
    """A picture of the times of one request, one bar for each stage; see `/v1/pipeline/requests/{id}`."""
    scale = (_WIDTH - _LABEL - 60) / max(stage["finished"] for stage in stages)
    marks = []
    for row, stage in enumerate(stages):
        y = row * _ROW
        marks.append(f'<text x="0" y="{y + 15}">{escape(stage["name"])}</text>')
        first = stage["finished"] if stage["first_output"] is None else stage["first_output"]
        times = (stage["arrival"], stage["started"], first, stage["finished"])
        for (what, colour), begin, end in zip(_COLOURS, times, times[1:], strict=False):
            marks.append(
                f'<rect x="{_LABEL + begin * scale:.1f}" y="{y + 5}" width="{max(0.0, end - begin) * scale:.1f}" '
                f'height="12" fill="{colour}"><title>{what}: {end - begin:.3f} s</title></rect>'
            )
        x = _LABEL + stage["finished"] * scale + 6
        marks.append(f'<text x="{x:.1f}" y="{y + 15}">{stage["finished"]:.2f} s</text>')
    legend = " · ".join(f'<span style="color:{colour}">■</span> {what}' for what, colour in _COLOURS)
    height = len(stages) * _ROW
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" font-size="13" fill="currentColor">'
    return f"{drawing}{''.join(marks)}</svg><p>{legend}</p>"
