# SPDX-License-Identifier: Apache-2.0
"""examples/grafana.json, read by Grafana's own models and by a parser of PromQL.

`tests/entrypoints/openai/test_metrics_page.py` compares it with the metrics of a running server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from vllm_omni.metrics.stats import StageState

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
WIDTH = 24  # of Grafana's grid


def unknown(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Paths of what Grafana's models have no field for, or read as something else."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from unknown(value, kept[name], f"{path}/{name}") if name in kept else (f"{path}/{name}",)
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from unknown(value, other, f"{path}/{index}")
    elif given != kept:
        yield path


def read_by_grafana(dashboard: dict[str, Any]) -> list[str]:
    plugins.register_default_plugins()
    kept = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    return list(unknown(dashboard, kept))


def test_grafana_knows_all_fields() -> None:
    assert read_by_grafana(DASHBOARD) == []


@pytest.mark.parametrize("path", ["descripton", "fieldConfig/defaults/units", "targets/0/expression", "options/row"])
def test_a_field_that_grafana_does_not_know_is_found(path: str) -> None:
    dashboard = json.loads(json.dumps(DASHBOARD))
    *parents, name = path.split("/")
    place = dashboard["panels"][1]
    for parent in parents:
        place = place[int(parent) if parent.isdecimal() else parent]
    place[name] = "x"
    assert read_by_grafana(dashboard) == [f"/panels/1/{path}"]


def test_the_data_source_is_a_choice() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    assert all(panel["datasource"]["uid"] == f"${{{variable['name']}}}" for panel in PANELS)


def test_every_panel_says_what_it_shows() -> None:
    assert len(PANELS) > 25 and all(panel["description"].endswith(".") for panel in PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= WIDTH and not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_expressions_are_promql(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))


def test_states_have_their_names() -> None:
    (panel,) = [panel for panel in PANELS if panel["type"] == "state-timeline"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    expression = panel["targets"][0]["expr"]
    shown = {mapping["options"][number]["text"]: number for number in mapping["options"]}
    assert shown.keys() == {state.value for state in StageState}
    assert all(f'{number} * vllm_omni:stage_state{{state="{name}"}}' in expression for name, number in shown.items())
