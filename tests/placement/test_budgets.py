# SPDX-License-Identifier: Apache-2.0
"""Memory budgets of stages, on simulated accelerators; budgets reach vLLM as engine arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.errors import StageConfigError
from vllm_omni.placement import budgets
from vllm_omni.placement.budgets import apply_budgets

from .machines import install, pipeline

GIB = 1 << 30


def applied(argument: str, *stages: dict[str, Any]) -> list[Any]:
    config = apply_budgets(pipeline(*stages))
    return [stage.vllm_engine_args.get(argument) for stage in config.stage_args]


def util(fraction: float) -> dict[str, Any]:
    return {"gpu_memory_utilization": fraction}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 80 * GIB, 40 * GIB)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=8 * GIB, available=4 * GIB)
    monkeypatch.setattr(budgets.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(budgets, "get_cgroup_memory_limit", lambda: None)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("stages", "fractions"),
    [
        ([{"devices": 0, "memory": 0.3}, {"devices": 1, "memory": "0.9"}], [0.3, 0.9]),
        ([{"devices": 0, "memory": "20GiB"}, {"devices": 0, "memory": "60GiB"}], [0.25, 0.75]),
        ([{"devices": 1, "memory": "20GiB"}], [0.5]),
        ([{"memory": "20GiB"}], [0.25]),
        # The budget also applies to the larger of two devices.
        ([{"devices": "0,1", "memory": "20GiB", "engine_args": {"tensor_parallel_size": 2}}], [0.25]),
        # A stage alone on a device needs no budget.
        ([{"devices": 0}, {"devices": 1, "engine_args": util(0.4)}], [None, 0.4]),
        (
            [{"devices": 0, "memory": 0.1}, {"devices": 0, "memory": 0.2}, {"devices": 0, "memory": 0.7}],
            [0.1, 0.2, 0.7],
        ),
        # A stage without vLLM has no default; its budget counts.
        ([{"devices": 0}, {"devices": 0, "engine_type": "fake"}], [None, None]),
        ([{"devices": 0, "memory": 0.4}, {"devices": 0, "engine_type": "DiT"}], [0.4, None]),
        ([{"devices": 0, "engine_type": "DiT"}, {"devices": 0, "engine_type": "DiT"}], [None, None]),
        ([{"devices": 0, "memory": 0.4}, {"devices": 0, "memory": "48GiB", "engine_type": "DiT"}], [0.4, None]),
        ([{"devices": 0}, {"devices": 1, "engine_type": "DiT"}], [None, None]),
    ],
)
def test_budgets_on_accelerators(stages: list[dict[str, Any]], fractions: list[float | None]) -> None:
    assert applied("gpu_memory_utilization", *stages) == fractions


@pytest.mark.usefixtures("two_gpus")
def test_an_engine_argument_of_the_caller_overrides_the_file() -> None:
    config = pipeline({"memory": 0.5})
    (stage,) = config.stage_args
    stage.engine_args.update(util(0.2))
    assert apply_budgets(config).stage_args[0].engine_args["gpu_memory_utilization"] == 0.2


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("stages", "rows"),
    [
        (
            [{"devices": 0, "memory": 0.7}, {"devices": "0", "engine_args": util(0.35)}, {"devices": 1}],
            ["device 0", "stage 0 (a)", "0.700", "stage 1 (b)", "0.350", "total", "1.050", "available", "1.000"],
        ),
        ([{"devices": 0, "memory": 0.3}, {}], ["device 0", "0.300", "0.920  vLLM's default", "1.220"]),
        ([{"devices": 1, "memory": "30GiB"}, {"devices": 1, "memory": "11GiB"}], ["device 1", "0.750", "0.275"]),
        ([{"devices": 1, "memory": "50GiB"}], ["device 1", "1.250"]),
        ([{"devices": 0, "memory": 0.5}, {"devices": 0, "memory": 0.6, "engine_type": "fake"}], ["0.600", "1.100"]),
        ([{"devices": 0}, {"devices": 0, "memory": "40GiB", "engine_type": "DiT"}], ["0.920", "0.500", "1.420"]),
        ([{"devices": 0}, {}], ["device 0", "1.840"]),
        (
            [
                {"devices": "0,1", "memory": 0.6, "engine_args": {"tensor_parallel_size": 2}},
                {"devices": 1, "memory": 0.5},
            ],
            ["device 1", "1.100"],
        ),
    ],
)
def test_more_than_the_device_s_memory_is_an_error_with_a_table(stages: list[dict[str, Any]], rows: list[str]) -> None:
    with pytest.raises(StageConfigError, match=r"set runtime\.memory of each stage") as error:
        apply_budgets(pipeline(*stages))
    for row in rows:
        assert row in str(error.value)


@pytest.mark.usefixtures("two_gpus")
def test_a_diffusion_stage_beside_vllm_needs_budgets() -> None:
    with pytest.raises(
        StageConfigError, match=r"stage 1 \(b\): shares device 0 with stage 0 \(a\), which takes 0\.920"
    ):
        apply_budgets(pipeline({"devices": 0}, {"devices": 0, "engine_type": "DiT"}))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (
            {"devices": "GPU-a", "memory": "20GiB"},
            r"stage 0 \(a\).*the size of device GPU-a is unknown; use",
        ),
        (
            {"engine_args": {"gpu_memory_utilization": "half"}},
            r"stage 0 \(a\): engine_args.gpu_memory_utilization must be a number",
        ),
    ],
)
def test_an_argument_that_is_not_a_number_is_an_error(stage: dict[str, Any], says: str) -> None:
    with pytest.raises(StageConfigError, match=says):
        apply_budgets(pipeline(stage))


@pytest.mark.usefixtures("two_gpus")
def test_bytes_of_a_device_of_unknown_size() -> None:
    assert applied("gpu_memory_utilization", {"devices": "MIG-a", "memory": 0.5}, {"devices": "MIG-a", "memory": 0.5})


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("stages", "sizes"),
    [
        ([{"memory": "1GiB"}, {"memory": 0.25}], [GIB, 2 * GIB]),
        ([{}, {"engine_args": {"kv_cache_memory_bytes": 5 << 20}}], [None, 5 << 20]),
        ([{"memory": "2GiB", "engine_args": {"kv_cache_memory_bytes": 5 << 20}}], [5 << 20]),
        ([{"memory": "2GiB", "engine_type": "fake"}], [None]),
        # Only accelerators have this argument.
        ([{"engine_args": util(0.9)}] * 3, [None] * 3),
    ],
)
def test_on_a_cpu_a_budget_is_the_kv_cache(stages: list[dict[str, Any]], sizes: list[int | None]) -> None:
    assert applied("kv_cache_memory_bytes", *stages) == sizes


@pytest.mark.usefixtures("small_machine")
def test_more_than_the_machine_s_memory_is_an_error_with_a_table() -> None:
    with pytest.raises(StageConfigError) as error:
        apply_budgets(pipeline({"memory": "3GiB"}, {"memory": "1GiB"}, {}))
    for row in ("this machine's memory", "3.00 GiB", "0.50 GiB  KV cache: the default", "4.50 GiB", "4.00 GiB"):
        assert row in str(error.value)


@pytest.mark.usefixtures("small_machine")
def test_a_container_s_limit_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "get_cgroup_memory_limit", lambda: 2 * GIB)
    assert applied("kv_cache_memory_bytes", {"memory": 0.5}) == [GIB]
    with pytest.raises(StageConfigError, match=r"available +2\.00 GiB"):
        apply_budgets(pipeline({"memory": "3GiB"}))


@pytest.mark.usefixtures("small_machine")
def test_a_budget_with_vllm_s_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.raises(StageConfigError, match="no effect while VLLM_CPU_KVCACHE_SPACE is set; unset one"):
        apply_budgets(pipeline({"memory": "1GiB"}))
