# SPDX-License-Identifier: Apache-2.0
"""The memory of the shipped configurations with published checkpoints, and its table in the documentation."""

from typing import Any

import pytest

from tests.published.plans import ROOT, ROWS, as_markdown, compute_plans

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["checkpoint"], row["machine"], row["options"]): row for row in compute_plans()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} on {row[1]}")
def test_shipped_configurations_fit_their_machines(plans, row: tuple[str, str, str]) -> None:
    plan = plans[row]
    assert (plan["verdict"], plan["problems"]) == ("fits", [])
    for stage in plan["stages"]:
        assert stage["needs"] <= stage["budget"]
        assert stage["room"] >= stage["max_model_len"] or not stage["kv_request"]


def test_published_parameters_are_counted(plans) -> None:
    """The number of parameters, or the size of the files, of the published weights: tests/published/README.md."""
    rows = {checkpoint: plan["stages"] for (checkpoint, _, options), plan in plans.items() if not options}
    parameters = {name: sum(stage["num_parameters"] for stage in stages) for name, stages in rows.items()}
    assert parameters["qwen3_omni_30b_a3b_instruct"] == 35_259_818_545
    size = sum(stage["weights"] for stage in rows["qwen2_5_omni_7b"])
    assert size == pytest.approx(22.37e9, rel=0.005)  # buffers are not in the files


def test_the_memory_table_is_up_to_date() -> None:
    assert as_markdown(compute_plans()) in (ROOT / "docs" / "models.md").read_text(), (
        "replace the table of docs/models.md by the output of: python -m tests.published.plans --markdown"
    )
