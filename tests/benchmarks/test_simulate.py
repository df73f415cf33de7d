# SPDX-License-Identifier: Apache-2.0
"""The simulation of `benchmarks/simulate.py`."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def simulate(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("simulate")


def stages(simulate: ModuleType, **changes: float) -> list[Any]:
    one = {"step_ms": 10, "per_request_ms": 1, "units_per_s": 4, "max_num_seqs": 4}
    return [simulate.Stage(name=name, **one | changes) for name in ("first", "second")]


def test_one_answer_takes_the_steps_that_it_needs(simulate: ModuleType) -> None:
    figures = simulate.simulate(stages(simulate, prefill_ms=5), 1, 100)
    # Two steps of the first stage, one of the second; each stage begins with a prefill.
    assert figures["first_audio_p95_s"] == pytest.approx(0.005 + 2 * 0.011 + 0.016)
    assert figures["interrupted"] == 0


def test_what_is_too_slow_is_heard_and_more_replicas_help(simulate: ModuleType) -> None:
    slow = stages(simulate, step_ms=100, per_request_ms=30)
    assert simulate.simulate(slow, 20, 100)["interrupted"] > 0.2
    row = simulate.scale(slow, 20, 100, 1.0)
    assert row["interrupted"] <= 0.01 and row["first_audio_p95_s"] <= 1.0
    assert row["replicas"] != "1 first, 1 second"
