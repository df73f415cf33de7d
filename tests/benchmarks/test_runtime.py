# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/runtime.py` on which its figures depend."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow


@pytest.fixture
def runtime(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("runtime")


def test_a_hop_is_timed_from_function_to_function_and_includes_the_mapping_of_memory(runtime: ModuleType) -> None:
    stages = importlib.import_module("runtime_stages")
    request = StageRequest(request_id="r", options={"num_bytes": 1 << 20})
    sent = stages.send(request, {})
    time.sleep(0.05)
    source = StageOutput(request_id="r", stage_id=0, tensors={"payload": sent["payload"]}, data={"sent": sent["sent"]})
    assert torch.equal(sent["payload"], torch.ones(1 << 20, dtype=torch.uint8))
    assert float(stages.receive(request, {0: source})["text"]) >= 0.05


def test_six_stages_are_twice_the_three(runtime: ModuleType, tmp_path: Path) -> None:
    config = load_pipeline_config(runtime.write_doubled_config(tmp_path))
    assert [stage.engine_input_source for stage in config.stage_args] == [[], [0], [1], [], [3], [4]]
    assert [stage.name for stage in config.stage_args[3:]] == ["thinker_2", "talker_2", "code2wav_2"]


def test_a_round_trip_is_one_between_two_processes(runtime: ModuleType, tmp_path: Path) -> None:
    with runtime.round_trips(tmp_path) as round_trip:
        assert all(round_trip() > 0 for _ in range(5))


@pytest.mark.parametrize("name", ["diffusion", "efficiency", "offline", "runtime", "serve", "streaming", "versus_vllm"])
def test_every_benchmark_has_help(
    name: str,
    import_benchmark: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit_:
        import_benchmark(name).main()
    assert exit_.value.code == 0
    assert "--quick" in capsys.readouterr().out
