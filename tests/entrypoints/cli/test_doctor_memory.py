# SPDX-License-Identifier: Apache-2.0
"""Whether stages fit into the memory of a machine. Their needs are fake."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.placement.machines import pipeline
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import find_stage_configs, shipped_variants, stage_configs_dir
from vllm_omni.entrypoints.cli import doctor_memory
from vllm_omni.entrypoints.cli.doctor_memory import Machine, MemoryPlan, MemoryPlanner, as_table
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.memory_needs import StageNeeds

GIB = 1 << 30
# 10 GiB of weights, 2 of activations, and 1 MiB of KV cache for a token, for at least 1024 tokens: 13 GiB.
NEEDS = StageNeeds(weights=10 * GIB, activations=2 * GIB, kv_token=1 << 20, kv_request=GIB, max_model_len=1024)


@pytest.fixture(autouse=True)
def fake_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(config: PipelineConfig, stage: Any, model: str) -> StageNeeds | None:
        if stage.name == "f":
            raise StageConfigError("no such thing")
        if stage.kind.name == "DiT":
            return StageNeeds(weights=10 * GIB, activations=None)
        return NEEDS if stage.kind.params == "sampling" else None

    monkeypatch.setattr(doctor_memory, "stage_needs", needs)


def plan(*stages: dict[str, Any], gib: tuple[float, ...] = (40,)) -> MemoryPlan:
    machine = Machine("it", tuple(int(size * GIB) for size in gib))
    return MemoryPlanner(pipeline(*stages), "model").plan(machine)


@pytest.mark.parametrize(
    ("stages", "gib"),
    [
        ([{"memory": 0.33}], (40,)),
        ([{"memory": "13GiB"}, {"memory": "13GiB"}], (27,)),  # and half a GiB for each process
        ([{}], (15,)),  # vLLM's default, 0.92
        ([{"engine_args": {"gpu_memory_utilization": 0.5}}], (27,)),
        ([{"devices": 1}], (1, 15)),
        ([{"devices": "0,1", "engine_args": {"tensor_parallel_size": 2}}], (8, 8)),
        ([{}, {"engine_type": "fake"}], (15,)),
    ],
)
def test_stages_that_fit(stages: list[dict[str, Any]], gib: tuple[float, ...]) -> None:
    found = plan(*stages, gib=gib)
    assert (found.problems, found.verdict) == ([], "fits")


@pytest.mark.parametrize(
    ("stages", "gib", "words"),
    [
        ([{"memory": 0.32}], (40,), ["a needs 13.0 GiB, and its budget is 12.8 GiB", "--stage.a.max_model_len", "819"]),
        ([{"memory": "9GiB"}], (40,), ["--stage.a.runtime.memory", "tensor_parallel_size", "quantization fp8"]),
        ([{}], (14,), ["its budget is 12.9 GiB"]),
        ([{"memory": "13GiB"}, {"memory": "13GiB"}], (26.5,), ["device 0 has 26.5 GiB", "26.0 GiB", "1.0 GiB more"]),
        ([{"devices": 2}], (40, 40), ["a needs device 2: 3 devices, and there are 2"]),
        ([{"memory": "13GiB"}, {"engine_type": "DiT"}], (23,), ["device 0 has 23.0 GiB", "23.0 GiB", "1.0 GiB more"]),
        ([{"engine_type": "DiT", "memory": "9GiB"}], (40,), ["a needs 10.0 GiB, and its budget is 9.0 GiB"]),
    ],
)
def test_stages_that_do_not_fit(stages: list[dict[str, Any]], gib: tuple[float, ...], words: list[str]) -> None:
    found = plan(*stages, gib=gib)
    assert found.verdict == "does not fit"
    (problem,) = found.problems
    for word in words:
        assert word in problem


def test_a_lower_max_model_len_is_no_remedy_if_the_weights_do_not_fit() -> None:
    (problem,) = plan({"memory": "9GiB"}).problems
    assert "max_model_len" not in problem


def test_memory_that_cannot_be_computed_is_not_known() -> None:
    found = plan({"memory": "13GiB"}, {"engine_type": "DiT"})
    assert (found.problems, found.verdict) == ([], "not known")
    assert "activations are not computed" in as_table(found)
    named = plan({"devices": "GPU-a"})
    assert (named.problems, named.verdict) == ([], "not known")
    assert "give devices by number" in as_table(named)
    failed = plan(*[{"memory": 0.1}] * 2, *[{"engine_type": "fake"}] * 3, {"memory": 0.1}, gib=(200,))
    assert failed.verdict == "not known"
    assert "not computed: no such thing" in as_table(failed)


def test_the_table() -> None:
    header, row = as_table(plan({"memory": "20GiB"})).splitlines()
    assert re.split(" {2,}", header) == [
        "stage", "devices", "weights", "activations", "KV cache", "other", "needs", "budget",
    ]  # fmt: skip
    assert re.split(" {2,}", row) == [
        "a", "0", "10.0", "2.0", "1.0", "0.0", "13.0", "20.0", "KV cache for 8,192 tokens: 8.0 requests of 1,024",
    ]  # fmt: skip


def test_two_devices_have_half_of_the_memory_each() -> None:
    stage = {"devices": "0,1", "engine_args": {"tensor_parallel_size": 2}, "memory": "10GiB"}
    (found,) = plan(stage, gib=(40, 40)).stages
    assert found.needed == 6.5 * GIB
    assert found.room == 8 * 1024


# Names of shipped configurations.


def test_a_shipped_configuration_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = stage_configs_dir() / "qwen3_omni_moe_2x80gb.yaml"
    assert find_stage_configs("qwen3_omni_moe_2x80gb") == shipped
    assert find_stage_configs("qwen3_omni_moe_2x80gb.yaml") == Path("qwen3_omni_moe_2x80gb.yaml")
    assert find_stage_configs("nothing") == Path("nothing")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()  # A file of this name hides nothing.
    assert find_stage_configs("text") == stage_configs_dir() / "text.yaml"
    assert find_stage_configs("./text") == Path("text")


def test_variants_are_those_of_the_same_model() -> None:
    default = stage_configs_dir() / "qwen3_omni_moe.yaml"
    assert {path.stem for path in shipped_variants(default)} == {"qwen3_omni_moe_2x80gb", "qwen3_omni_moe_141gb"}
    variant = stage_configs_dir() / "qwen3_omni_moe_141gb.yaml"
    assert {path.stem for path in shipped_variants(variant)} == {"qwen3_omni_moe_2x80gb", "qwen3_omni_moe"}
    assert shipped_variants(stage_configs_dir() / "qwen2_5_omni.yaml") == []
    assert shipped_variants(Path("mine.yaml")) == shipped_variants(None) == []
