# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/runtime.py` that must be right for its figures to mean anything."""

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a part as the script does, which has its own folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"runtime_parts.{name}")


def test_a_hop_is_timed_from_function_to_function_and_includes_the_mapping_of_memory(part: Any) -> None:
    functions = part("functions")
    request = StageRequest(request_id="r", options={"num_bytes": 1 << 20})
    sent = functions.send(request, {})
    time.sleep(0.05)
    source = StageOutput(request_id="r", stage_id=0, tensors={"payload": sent["payload"]}, data={"sent": sent["sent"]})
    assert torch.equal(sent["payload"], torch.ones(1 << 20, dtype=torch.uint8))
    assert float(functions.receive(request, {0: source})["text"]) >= 0.05


def test_six_stages_are_twice_the_three(part: Any, tmp_path: Path) -> None:
    config = load_pipeline_config(part("start")._write_doubled_config(tmp_path))
    assert [stage.engine_input_source for stage in config.stage_args] == [[], [0], [1], [], [3], [4]]
    assert [stage.name for stage in config.stage_args[3:]] == ["thinker_2", "talker_2", "code2wav_2"]


def test_what_is_bare_is_measured_between_processes(part: Any, tmp_path: Path) -> None:
    bare = part("bare")
    with bare.RoundTrip(tmp_path) as round_trip:
        assert len(round_trip.measure(5)) == 5
    assert round_trip._echo.returncode == 0
    assert all(seconds > 0 for seconds in bare.measure_copies(1 << 16, 3))
