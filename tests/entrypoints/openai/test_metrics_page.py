# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of a running server: the metrics of its engines, and all that the dashboard asks for."""

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.orchestrator.test_failure import wait_until
from vllm_omni.metrics.stats import StageState

GROUP = "server"
DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
STAGES = {"thinker", "talker", "code2wav"}
SELECTOR = re.compile(r"((?:vllm(?:_omni)?:|process_)\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"instance"}
"""Labels that it adds to what it reads."""


def read(url: str) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def total(url: str, name: str) -> dict[str, float]:
    return {labels["stage"]: value for found, labels, value in read(url) if found == name}


def test_the_metrics_of_every_engine(omni_server):
    name = "vllm:request_success_total"
    assert omni_server.openai().chat.completions.create(
        model=omni_server.model, messages=[{"role": "user", "content": "Why?"}], modalities=["text", "audio"],
        max_completion_tokens=8,
    ).choices[0].message.audio  # fmt: skip
    samples = read(omni_server.url)
    assert {labels["stage"] for found, labels, _ in samples if found == name} == STAGES
    of_vllm = [(found, labels) for found, labels, _ in samples if found.startswith("vllm:")]
    of_engines = {found for found, labels in of_vllm if "stage" in labels}
    assert all({"model_name", "engine", "stage"} <= labels.keys() for found, labels in of_vllm if "_tokens" in found)
    assert all({"pipeline", "replica"} <= labels.keys() for _, labels in of_vllm if "stage" in labels)
    # The server has some of its own, such as the number of its WebSocket connections.
    assert len(of_engines) > 40 and of_engines.isdisjoint(found for found, labels in of_vllm if "stage" not in labels)
    wait_until(lambda: set(total(omni_server.url, "vllm:num_requests_running").values()) == {0})
    wait_until(lambda: all(value > 0 for value in total(omni_server.url, "vllm:prompt_tokens_total").values()))


def test_the_states_and_the_memory_of_the_stages(omni_server):
    samples = read(omni_server.url)
    states = {(labels["stage"], labels["state"]) for found, labels, _ in samples if found == "vllm_omni:stage_state"}
    assert {stage for stage, _ in states} == STAGES and len(states) == len(StageState) * len(STAGES)
    ready = [labels for found, labels, value in samples if found == "vllm_omni:stage_state" and value == 1]
    assert [labels["state"] for labels in ready] == ["ready"] * len(STAGES)
    memory = total(omni_server.url, "vllm_omni:stage_resident_memory_bytes")
    assert memory.keys() == STAGES and all(50 << 20 < value < 64 << 30 for value in memory.values())


def test_the_dashboard_asks_for_what_there_is(omni_server):
    labels_of: dict[str, set[str]] = {}
    for name, labels, _ in read(omni_server.url):
        labels_of.setdefault(name, set()).update(labels)
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert len(targets) > 20
    for target in targets:
        metrics = SELECTOR.findall(target["expr"])
        assert metrics, target
        grouped = {label.strip() for labels in GROUPING.findall(target["expr"]) for label in labels.split(",")}
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= grouped, target
        for name, selector in metrics:
            used = grouped - OF_PROMETHEUS | set(re.findall(r"(\w+)\s*=", selector))
            assert name in labels_of or _has_no_sample_yet(name), target
            assert used <= labels_of.get(name, used), target


def _has_no_sample_yet(name: str) -> bool:
    """A counter of failures has none before the first failure."""
    return name == "vllm_omni:stage_failures_total"
