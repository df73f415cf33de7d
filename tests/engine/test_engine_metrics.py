# SPDX-License-Identifier: Apache-2.0
"""vLLM's metrics of single engines, without the engines."""

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.engine_metrics import EngineMetrics


@pytest.fixture(scope="module")
def vllm_config(tiny_qwen3) -> VllmConfig:
    return create_engine_args(str(tiny_qwen3), engine_type="ar", max_model_len=64).create_engine_config()


def read(metrics: EngineMetrics, sample_name: str) -> float:
    (value,) = [value for family in metrics.families() for name, _, value in family.samples if name == sample_name]
    return value


def test_two_engines_of_a_process_do_not_share_metrics(vllm_config):
    first, second = EngineMetrics(vllm_config), EngineMetrics(vllm_config)
    for metrics, num_tokens in ((first, 3), (second, 4), (first, 5)):
        iteration = IterationStats()
        iteration.num_generation_tokens = num_tokens
        metrics.record(SchedulerStats(num_running_reqs=num_tokens), iteration)
    assert (read(first, "vllm:generation_tokens_total"), read(second, "vllm:generation_tokens_total")) == (8, 4)
    assert (read(first, "vllm:num_requests_running"), read(second, "vllm:num_requests_running")) == (5, 4)
    assert b"vllm:generation_tokens" not in generate_latest(REGISTRY)


def test_creation_times_are_left_out(vllm_config):
    names = [name for family in EngineMetrics(vllm_config).families() for name, _, _ in family.samples]
    assert len(names) > 100 and not [name for name in names if name.endswith("_created")]
