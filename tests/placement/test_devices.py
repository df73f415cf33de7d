# SPDX-License-Identifier: Apache-2.0
"""Which accelerators are visible to a stage, on simulated machines; drivers read the environment variable."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import vllm_omni
from vllm_omni.errors import StageConfigError
from vllm_omni.placement import devices
from vllm_omni.placement.devices import alone_on_devices, set_stage_gpu_devices, stage_devices

from .machines import VARIABLE, install, pipeline

GIB = 1 << 30


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        (None, "2,5,7", "2,5,7"),
        (None, "7,2", "7,2"),
        (None, 1, "1"),
        (None, "3", "3"),
        ("4,5,6", 1, "5"),
        ("4,5,6", "2", "6"),
        ("4,5,6", "2,0", "6,4"),
        ("GPU-a1, GPU-b2", "1", "GPU-b2"),
        ("4,5,6", "GPU-c3", "GPU-c3"),
        (None, "MIG-d4,0", "MIG-d4,0"),
        ("4,5,6", None, "4,5,6"),
        (None, None, None),
    ],
)
def test_devices_become_the_variable_of_the_platform(
    visible: str | None, devices: str | int | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 8 if visible is None else len(visible.split(","))
    install(monkeypatch, *[GIB] * count, visible=visible)
    monkeypatch.setenv(VARIABLE, os.environ.get(VARIABLE, ""))  # restored after the test
    if visible is None:
        monkeypatch.delenv(VARIABLE)
    set_stage_gpu_devices(devices)
    assert os.environ.get(VARIABLE) == seen


@pytest.mark.parametrize(
    ("visible", "devices", "says"),
    [
        (None, "2", ["talker: runtime.devices names device 2", "sees 2", "is not set", "a number below 2"]),
        ("4,5", "0,4", ["names device 4", f"{VARIABLE} is '4,5'", "a number below 2, or make more visible"]),
        ("4,5", "0,0", ["names a device twice"]),
        ("4,GPU-a", "1,GPU-a", ["'1,GPU-a' means GPU-a,GPU-a: one device twice; name each once"]),
        (None, "first", ["'first' is not a device", "write a number"]),
    ],
)
def test_the_error_for_a_missing_device_names_the_visible_ones(
    visible: str | None, devices: str, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, GIB, GIB, visible=visible)
    with pytest.raises(StageConfigError) as error:
        set_stage_gpu_devices(devices, "talker")
    for part in says:
        assert part in str(error.value)


def test_the_error_without_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, visible="")
    with pytest.raises(StageConfigError, match=r"names device 0, but this process sees none .*check the driver"):
        set_stage_gpu_devices("0")


def test_devices_of_a_process_that_uses_them_cannot_change(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GIB, GIB, visible="0,1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="used before its devices '1' were chosen"):
        set_stage_gpu_devices("1")
    assert os.environ[VARIABLE] == "0,1"


def test_on_a_cpu_devices_are_ignored_with_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    lines: list[str] = []
    monkeypatch.setattr(devices.logger, "debug", lambda line, *values: lines.append(line % values))
    vllm_omni.set_stage_gpu_devices("99", "stage 0 (thinker)")
    assert lines == ["stage 0 (thinker): devices '99' have no effect on a CPU"]
    assert dict(os.environ) == environment
    assert stage_devices(pipeline({"devices": "0,1"}, {"devices": 7})) == {0: [], 1: []}


def test_the_devices_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *[GIB] * 3, visible="4,5,6")
    two_wide = {"engine_args": {"tensor_parallel_size": 2}}
    context = {"engine_args": {"prefill_context_parallel_size": 2}}
    config = pipeline(
        {"devices": "1,2", **two_wide},
        context,
        {},
        {"devices": 2},
        {"devices": "0,1", "engine_type": "fake"},
        {"devices": "2,0", "engine_type": "DiT", "engine_args": {"data_parallel_size": 2}},
    )
    assert stage_devices(config) == {0: ["5", "6"], 1: ["4", "5"], 2: ["4"], 3: ["6"], 4: ["4", "5"], 5: ["6", "4"]}


def test_the_devices_of_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *[GIB] * 3, visible="4,5,6")
    config = pipeline({"replicas": 2, "devices": ["1", "2"]}, {"replicas": 2, "devices": 0})
    assert stage_devices(config) == {0: ["5"], 2: ["6"], 1: ["4"], 3: ["4"]}


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (
            {"devices": "0,1"},
            r"stage 0 \(a\): runtime.devices names 2 \(0, 1\), but its engine takes 1 .* make the two equal",
        ),
        ({"devices": "0", "engine_args": {"pipeline_parallel_size": 2}}, r"names 1 \(0\), but its engine takes 2"),
        (
            {"devices": "0,1", "engine_type": "DiT", "engine_args": {"data_parallel_size": 2, "ulysses_degree": 2}},
            r"names 2 \(0, 1\), but its engine takes 4 \(data_parallel_size x ulysses_degree x ring_degree\)",
        ),
        ({"devices": "5"}, r"stage 0 \(a\): runtime.devices names device 5, but this process sees 2"),
        ({"engine_args": {"tensor_parallel_size": 4}}, r"stage 0 \(a\).*device 2, but this process sees 2"),
    ],
)
def test_the_number_of_devices_must_match_the_engine(stage: dict, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GIB, GIB)
    with pytest.raises(StageConfigError, match=says):
        stage_devices(pipeline(stage))


def test_stages_that_share_a_device_start_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, GIB, visible="0")
    (stage,) = pipeline({}).stage_args
    waiting, finished = threading.Event(), threading.Event()
    flock = fcntl.flock

    def start_the_other() -> None:
        with alone_on_devices(str(tmp_path), stage):
            finished.set()

    def lock(fd: int, operation: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            waiting.set()  # It has chosen the lock of its device.
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    with alone_on_devices(str(tmp_path), stage):
        other = threading.Thread(target=start_the_other)
        other.start()
        waiting.wait()
        monkeypatch.setenv(VARIABLE, "1")
        with alone_on_devices(str(tmp_path), stage):  # another device is not locked
            assert not finished.is_set()
        monkeypatch.setenv(VARIABLE, "0")
    other.join()
    assert finished.is_set()


def test_on_a_cpu_no_stage_waits(tmp_path: Path) -> None:
    (stage,) = pipeline({}).stage_args
    with alone_on_devices(str(tmp_path), stage), alone_on_devices(str(tmp_path), stage):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_fork_server_uses_no_device() -> None:
    """A process forked from one that has used CUDA cannot use it, so no preloaded module may use it."""
    code = """
import importlib, json, os
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.engine.engine_args import _WORKERS
import torch

calls = []
torch.cuda._lazy_init = lambda: calls.append("_lazy_init")  # called by everything that needs a device
modules = ["vllm_omni.stage.worker", "vllm_omni.stage.engines.llm", "vllm.model_executor.model_loader"]
for path in (*OMNI_MODELS.values(), *_WORKERS.values(), *(module + ".x" for module in modules)):
    importlib.import_module(path.replace(":", ".").rpartition(".")[0])
# Only with this variable, which vLLM sets, `is_available` asks the driver's library and initializes nothing.
print(json.dumps([calls, torch.cuda.is_initialized(), os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [[], False, "1"]
