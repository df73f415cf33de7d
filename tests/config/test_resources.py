# SPDX-License-Identifier: Apache-2.0
"""`devices`, `memory` and `cpus` are parsed, or refused with a message that names the key."""

from typing import Any

import pytest

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.resources import parse_cpus, parse_devices, parse_memory
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.errors import StageConfigError


def pipeline(*runtimes: dict[str, Any]) -> PipelineConfig:
    stages = [
        {"stage_id": i, "engine_type": "fake", "engine_args": {"model_stage": "abcdef"[i]}, "runtime": runtime}
        for i, runtime in enumerate(runtimes)
    ]
    stages[-1] |= {"final_output": True, "final_output_type": "text"}
    return parse_pipeline_config({"stage_args": stages}, "my.yaml")


@pytest.mark.parametrize(
    ("devices", "entries"),
    [
        (0, ["0"]),
        (3, ["3"]),
        ("1", ["1"]),
        ("2,5,7", ["2", "5", "7"]),
        (" 7, 2 ", ["7", "2"]),
        ("01", ["1"]),
        ("GPU-8e26ba6f-1,MIG-GPU-8e/1/0", ["GPU-8e26ba6f-1", "MIG-GPU-8e/1/0"]),
    ],
)
def test_devices(devices: str | int, entries: list[str]) -> None:
    assert parse_devices(devices) == entries


@pytest.mark.parametrize(
    "devices", ["", "a", "0,", "0,,1", "0;1", -1, "-1", "0-1", "1.0", "cuda:0", "GPU-", "0,0", "0,00"]
)
def test_invalid_devices(devices: str | int) -> None:
    with pytest.raises(StageConfigError, match=r"devices.*(write a number|name each once)"):
        parse_devices(devices)


@pytest.mark.parametrize(
    ("memory", "value"),
    [
        (0.3, 0.3),
        ("0.3", 0.3),
        (1, 1.0),
        ("20GiB", 20 << 30),
        ("20G", 20 << 30),
        ("1.5 gib", 3 << 29),
        ("512MiB", 512 << 20),
        ("1TiB", 1 << 40),
        ("2GB", 2_000_000_000),
        (1 << 30, 1 << 30),
        (5e9, 5_000_000_000),
        ("4096KiB", 4 << 20),
    ],
)
def test_memory(memory: str | float, value: float | int) -> None:
    assert parse_memory(memory) == value
    assert type(parse_memory(memory)) is type(value)


@pytest.mark.parametrize(
    "memory", ["", "much", "20X", "-0.3", -0.3, 0, "GiB", "1.2.3GiB", "inf", float("nan"), 20, "512"]
)
def test_invalid_memory(memory: str | float) -> None:
    with pytest.raises(StageConfigError, match=r"memory.*a fraction of the device \(0.3\), or bytes with a unit"):
        parse_memory(memory)


@pytest.mark.parametrize(
    ("cpus", "value"), [("0-3,8", [0, 1, 2, 3, 8]), ("8, 0-1", [0, 1, 8]), ("5", [5]), ("1-1", [1]), (4, 4)]
)
def test_cpus(cpus: str | int, value: list[int] | int) -> None:
    assert parse_cpus(cpus) == value


@pytest.mark.parametrize("cpus", ["", "a", "3-1", "0-", "0,", "-1", 0, -2])
def test_invalid_cpus(cpus: str | int) -> None:
    with pytest.raises(StageConfigError, match=r"cpus.*(write a list|at least one)"):
        parse_cpus(cpus)


def test_each_replica_has_a_process_and_its_resources() -> None:
    config = pipeline(
        {"replicas": 2, "devices": ["2", "0,1"], "cpus": 3},
        {"replicas": 2, "devices": 3},
        {"process": True, "replicas": 2, "cpus": ["0-1", "2"]},
    )
    assert [i.name for i in config.instances.values()] == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    assert list(config.instances) == [0, 3, 1, 4, 2, 5], "the first replica has the id of the stage"
    runtimes = [instance.stage.runtime for instance in config.instances.values()]
    assert [runtime.devices for runtime in runtimes] == ["2", "0,1", 3, 3, None, None]
    assert [runtime.cpus for runtime in runtimes] == [3, 3, None, None, "0-1", "2"]
    assert [instance.label for instance in config.instances.values()][:2] == ["stage 0 (a.0)", "stage 0 (a.1)"]


@pytest.mark.parametrize(
    ("runtimes", "words"),
    [
        ([{"devices": "x"}], ["stage 0 (a): runtime.devices 'x'"]),
        ([{}, {"memory": "20X"}], ["stage 1 (b): runtime.memory '20X'"]),
        ([{"cpus": "3-1"}], ["stage 0 (a): runtime.cpus '3-1'"]),
        ([{"process": False}], ["stage 0 (a): runtime.process: each replica of a stage has a process of its own"]),
        ([{}, {"process": "shared"}], ["stage 1 (b): runtime.process", "write true, or leave it out"]),
        ([{"replicas": 0}], ["stage 0 (a): runtime.replicas: 0 is not a number of processes; write 1 or more"]),
        (
            [{"replicas": 3, "devices": ["0", "1"]}],
            ["stage 0 (a): runtime.devices: has 2 entries for 3 replicas; write one entry for each"],
        ),
        ([{"replicas": 2, "cpus": ["0", "x"]}], ["stage 0 (a): runtime.cpus 'x'"]),
        (
            [{"routing": "best"}],
            ["stage 0 (a): runtime.routing: there is no 'best'", "least_loaded, round_robin, prefix"],
        ),
    ],
)
def test_errors_name_key_and_remedy(runtimes: list[dict[str, Any]], words: list[str]) -> None:
    with pytest.raises(StageConfigError) as error:
        pipeline(*runtimes)
    assert str(error.value).startswith("my.yaml: ")
    for word in words:
        assert word in str(error.value)


def test_memory_is_set_once() -> None:
    raw = {
        "stage_args": [
            {
                "stage_id": 0,
                "runtime": {"memory": 0.5},
                "engine_args": {"gpu_memory_utilization": 0.5},
                "final_output": True,
                "final_output_type": "text",
            }
        ]
    }
    with pytest.raises(StageConfigError, match=r"runtime\.memory and engine_args\.gpu_memory_utilization.*keep one"):
        parse_pipeline_config(raw, "f")
