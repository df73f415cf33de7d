# SPDX-License-Identifier: Apache-2.0
"""The resources of a stage: parses `devices`, `memory` and `cpus` of its `runtime`.

Independent of the machine: `placement` checks that the resources exist.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_omni.config.dit_config import DIT_PARALLEL_SIZES
from vllm_omni.config.stage_config import (
    ROUTING_POLICIES,
    SHARED_PROCESS,
    OmniStageConfig,
    PipelineConfig,
    StageInstance,
)
from vllm_omni.config.utils import nearest
from vllm_omni.errors import StageConfigError

_T = TypeVar("_T")
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("ib", 1024), ("b", 1000))
}
_MIN_BYTES = 1 << 20
# The names that CUDA and ROCm give to a device, or to a part of one.
_DEVICE_NAME = re.compile(r"(GPU|MIG)-[\w/-]+", re.ASCII)


def parse_devices(devices: str | int) -> list[str]:
    """The entries of `runtime.devices`: numbers as decimal strings, or names such as `GPU-8e26ba6f`.

    Raises:
        StageConfigError: An entry is neither a number nor a name, or a device is listed twice.
    """
    entries = [entry.strip() for entry in str(devices).split(",")]
    for entry in entries:
        if not (re.fullmatch("[0-9]+", entry) or _DEVICE_NAME.fullmatch(entry)):
            raise StageConfigError(
                f"devices {devices!r}: {entry!r} is not a device; write a number (0), a comma list ('2,5'), or names "
                "as the driver gives them ('GPU-...', 'MIG-...')"
            )
    entries = [str(int(entry)) if entry.isdigit() else entry for entry in entries]
    if len(set(entries)) != len(entries):
        raise StageConfigError(f"devices {devices!r} names a device twice; name each once")
    return entries


def parse_memory(memory: str | float) -> float | int:
    """The value of `runtime.memory`: a fraction of the device (float, above 0, at most 1), or bytes (int).

    Raises:
        StageConfigError: The value is neither of these, or less than 1 MiB, which means that its unit is missing.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)", str(memory).strip())
    try:
        number, unit = float(match[1]), _UNITS[match[2].casefold()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise _memory_error(memory, "is not an amount of memory") from None
    if unit == 1 and 0 < number <= 1:
        return number
    if number * unit < _MIN_BYTES:
        raise _memory_error(memory, f"would be {number * unit:.0f} bytes")
    return int(number * unit)


def _memory_error(memory: str | float, problem: str) -> StageConfigError:
    return StageConfigError(
        f"memory {memory!r} {problem}; write a fraction of the device (0.3), or bytes with a unit ('20GiB', '512MiB')"
    )


def parse_cpus(cpus: str | int) -> list[int] | int:
    """The value of `runtime.cpus`: the cores of a list in Linux notation, sorted, or their number.

    Raises:
        StageConfigError: The value is neither of these.
    """
    if isinstance(cpus, int):
        if cpus < 1:
            raise StageConfigError(f"cpus {cpus}: a stage needs at least one core")
        return cpus
    cores: set[int] = set()
    for part in cpus.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise StageConfigError(
                f"cpus {cpus!r}: {part.strip()!r} is not a range of cores; write a list ('0-3,8'), or a number of "
                "cores without quotes (4)"
            )
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cores)


def check_resources(config: PipelineConfig) -> None:
    """Checks what is wrong on every machine.

    Raises:
        StageConfigError: A value cannot be parsed, a stage's memory is set twice, there is not one entry for each
            replica, or stages of one process have different devices or cores.
    """
    for stage in config.stage_args:
        try:
            _check_stage(stage)
        except StageConfigError as error:
            raise StageConfigError(f"{stage.label}: runtime.{error}") from error
    _check_shared_processes(config)
    for process in config.processes:
        process_devices(process)
        process_cpus(process)
        _check_parallel_denoisers(process)


def _check_shared_processes(config: PipelineConfig) -> None:
    first: dict[str, OmniStageConfig] = {}
    for stage in config.stage_args:
        if stage.runtime.process is not True:
            other = first.setdefault(stage.runtime.process or SHARED_PROCESS, stage)
            if other.runtime.replicas != stage.runtime.replicas:
                raise StageConfigError(
                    f"stages {other.stage_id} and {stage.stage_id} share processes (runtime.process) but have "
                    f"{other.runtime.replicas} and {stage.runtime.replicas} replicas; give both the same number"
                )


def _check_stage(stage: OmniStageConfig) -> None:
    runtime = stage.runtime
    if runtime.process == "":
        raise StageConfigError("process: the name is empty; write true for a process of its own")
    if runtime.replicas < 1:
        raise StageConfigError(f"replicas: {runtime.replicas} is not a number of processes; write 1 or more")
    if runtime.routing not in ROUTING_POLICIES:
        known = ", ".join(ROUTING_POLICIES)
        near = nearest(runtime.routing, ROUTING_POLICIES)
        raise StageConfigError(f"routing: there is no {runtime.routing!r}{near} (known: {known})")
    for name, amount in runtime.resources.items():
        if amount < 0:
            raise StageConfigError(f"resources: {name} is {amount:g}; write 0 or more")
    for key in ("devices", "cpus", "node"):
        value = getattr(runtime, key)
        if isinstance(value, list) and len(value) != runtime.replicas:
            raise StageConfigError(
                f"{key}: has {len(value)} entries for {runtime.replicas} replicas; write one entry for each, or one "
                "value for all"
            )
    for replica in range(runtime.replicas):
        own = runtime.of_replica(replica)
        if own.devices is not None:
            parse_devices(own.devices)  # type: ignore[arg-type]
        if own.cpus is not None:
            parse_cpus(own.cpus)  # type: ignore[arg-type]
    if runtime.memory is None:
        return
    parse_memory(runtime.memory)
    if "gpu_memory_utilization" in stage.engine_args:
        raise StageConfigError("memory and engine_args.gpu_memory_utilization set the same limit; keep one of them")


def _check_parallel_denoisers(process: list[StageInstance]) -> None:
    for instance in process:
        names = [name for name in DIT_PARALLEL_SIZES if instance.stage.engine_args.get(name, 1) != 1]
        if len(process) > 1 and instance.stage.kind == "DiT" and names:
            raise StageConfigError(
                f"{instance.label}: engine_args.{names[0]} needs a process without other stages, because a process is "
                "in one group of torch.distributed; set runtime.process to true"
            )


def process_devices(process: list[StageInstance]) -> list[str] | None:
    """The devices of the stages of one process, as `parse_devices` returns them; None: all devices.

    Raises:
        StageConfigError: Two stages have different devices.
    """
    return _common_value("devices", process, parse_devices)


def process_cpus(process: list[StageInstance]) -> list[int] | int | None:
    """The cores of the stages of one process, as `parse_cpus` returns them; None: not set.

    Raises:
        StageConfigError: Two stages have different cores.
    """
    return _common_value("cpus", process, parse_cpus)


def _common_value(key: str, process: list[StageInstance], parse: Callable[[Any], _T]) -> _T | None:
    """The value that all stages with this key share."""
    texts = {instance.stage.stage_id: getattr(instance.stage.runtime, key) for instance in process}
    values = {stage_id: parse(text) for stage_id, text in texts.items() if text is not None}
    (first, common), *others = values.items() or [(0, None)]
    for stage_id, value in others:
        if value != common:
            raise StageConfigError(
                f"stages {first} and {stage_id} share one process (runtime.process) but not runtime.{key}; set the "
                "same value for both, or set it for one of them"
            )
    return common
