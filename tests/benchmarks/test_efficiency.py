# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/efficiency.py` measures: CPU time by process and part, and stages alone."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.media import make_prompt

pytestmark = pytest.mark.slow


@pytest.fixture
def efficiency(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("efficiency")


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_clock_counts_cpu_time_of_nested_calls_once(efficiency: ModuleType, tmp_path: Path) -> None:
    clock = efficiency.efficiency_stages.ForwardClock(str(tmp_path / "clock"))
    inner = clock.timed(compute)

    @clock.timed
    def outer() -> None:
        inner(0.02)
        time.sleep(0.2)
        raise ValueError

    with pytest.raises(ValueError):
        outer()
    inner(0.02)

    compute(0.2)
    assert 0.04 <= np.memmap(tmp_path / "clock", np.float64, "r")[0] < 0.1


def test_all_processes_are_accounted_and_stages_run_alone(
    efficiency: ModuleType, tiny_qwen3_omni_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(efficiency.ENGINE_ARGS, "kv_cache_memory_bytes", 64 << 20)
    load = efficiency.Load(waves=1, requests=4, text_tokens=8, talker_tokens=9, rounds=1)
    prompts = [make_prompt(tiny_qwen3_omni_moe, "text", seed) for seed in range(4)]
    stages = ["thinker", "talker", "code2wav"]
    config = stage_configs_dir() / "qwen3_omni_moe.yaml"
    with efficiency.open_pipeline(tiny_qwen3_omni_moe, config, 4) as pipeline:
        rate, accounts = pipeline.run(prompts, load, 4)
        rates = efficiency.run_alone(pipeline.job(prompts, load))

    assert rate > 0 and list(rates) == stages and all(value > 0 for value in rates.values())
    assert {"caller", *stages} <= accounts.keys() and accounts["caller"].forwards == 0
    for stage in stages:
        assert accounts[stage].forwards > 0 and accounts[stage].engine > 0 and accounts[stage].others >= 0
