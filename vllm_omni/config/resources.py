# SPDX-License-Identifier: Apache-2.0
"""The resources of a stage: parses `devices`, `memory` and `cpus` of its `runtime`.

Independent of the machine: `placement` checks that the resources exist.
"""

import contextlib
import re

from vllm_omni.config.stage_config import ROUTING_POLICIES, OmniStageConfig, PipelineConfig, StageInstance
from vllm_omni.config.utils import nearest, parse_bytes
from vllm_omni.errors import StageConfigError

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
    with contextlib.suppress(ValueError):
        if 0 < (fraction := float(str(memory))) <= 1:
            return fraction
    try:
        size = parse_bytes(memory)
    except ValueError:
        raise _memory_error(memory, "is not an amount of memory") from None
    if size < _MIN_BYTES:
        raise _memory_error(memory, f"would be {size} bytes")
    return size


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


def instance_devices(instance: StageInstance) -> list[str] | None:
    """The devices that a replica names, as `parse_devices` returns them; None: all devices."""
    devices = instance.stage.runtime.devices
    return None if devices is None else parse_devices(devices)  # type: ignore[arg-type]


def instance_cpus(instance: StageInstance) -> list[int] | int | None:
    """The cores that a replica names, as `parse_cpus` returns them; None: not set."""
    cpus = instance.stage.runtime.cpus
    return None if cpus is None else parse_cpus(cpus)  # type: ignore[arg-type]


def check_resources(config: PipelineConfig) -> None:
    """Checks what is wrong on every machine.

    Raises:
        StageConfigError: A value cannot be parsed, a stage's memory is set twice, or there is not one entry for each
            replica.
    """
    for stage in config.stage_args:
        try:
            _check_stage(stage)
        except StageConfigError as error:
            raise StageConfigError(f"{stage.label}: runtime.{error}") from error


def _check_stage(stage: OmniStageConfig) -> None:
    runtime = stage.runtime
    if runtime.process is not True:
        raise StageConfigError("process: each replica of a stage has a process of its own; write true, or leave it out")
    if runtime.replicas < 1:
        raise StageConfigError(f"replicas: {runtime.replicas} is not a number of processes; write 1 or more")
    if runtime.routing not in ROUTING_POLICIES:
        known = ", ".join(ROUTING_POLICIES)
        near = nearest(runtime.routing, ROUTING_POLICIES)
        raise StageConfigError(f"routing: there is no {runtime.routing!r}{near} (known: {known})")
    for name, amount in runtime.resources.items():
        if not 0 <= amount < float("inf"):
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
