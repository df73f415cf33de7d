# SPDX-License-Identifier: Apache-2.0
"""Reads the output of observers, as Prometheus and Perfetto do."""

import json
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.prometheus import get_prometheus_registry


def scrape(prefix: str = "vllm_omni:") -> dict[tuple[str, ...], float]:
    """All samples with a prefix, by name and label values (labels in alphabetical order)."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(generate_latest(get_prometheus_registry()).decode()):
        if family.name.startswith(prefix):
            for sample in family.samples:
                key = (sample.name.removeprefix(prefix), *(v for _, v in sorted(sample.labels.items())))
                assert key not in found
                found[key] = sample.value
    return found


def read_events(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def tracks(events: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """The slices of a timeline, by the names of their group and track in Perfetto."""
    named: dict[str, dict] = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event["name"] in named:
            named[event["name"]][event["pid"], event.get("tid")] = event["args"]["name"]
    found: dict[tuple[str, str], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            group = named["process_name"][event["pid"], None]
            track = f"{named['thread_name'][event['pid'], event['tid']]} {event['tid']}"
            found.setdefault((group, track), []).append(event)
    return found


def assert_nested(slices: list[dict]) -> None:
    """No two slices of a track overlap partially: a viewer cannot draw them."""
    for a in slices:
        assert a["dur"] >= 0, a
        for b in slices:
            a_end, b_end = a["ts"] + a["dur"], b["ts"] + b["dur"]
            assert not (a["ts"] < b["ts"] < a_end < b_end), (a, b)
