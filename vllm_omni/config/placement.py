# SPDX-License-Identifier: Apache-2.0
"""How placement is written in a stage configuration: devices, memory and cores as text, turned into values.

It knows no machine: whether there is such a device or core is asked by `stage.devices` and `stage.budgets`.
"""

import re
from typing import TypeVar

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.errors import StageConfigError

_T = TypeVar("_T")
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("iB", 1024), ("B", 1000))
}
_UNITS_BY_CASE = {unit.casefold(): size for unit, size in _UNITS.items()}
_LEAST_BYTES = 1 << 20
# What CUDA and ROCm call a device, or a part of one, other than by its number.
_DEVICE_NAME = re.compile(r"(GPU|MIG)-[\w/-]+", re.ASCII)


def parse_devices(devices: str | int) -> list[str]:
    """The entries of `runtime.devices`: numbers as decimal strings, or names such as `GPU-8e26ba6f`.

    Raises:
        StageConfigError: It is neither a number nor a comma list of them, or names a device twice.
    """
    entries = [entry.strip() for entry in str(devices).split(",")]
    for entry in entries:
        if not (re.fullmatch("[0-9]+", entry) or _DEVICE_NAME.fullmatch(entry)):
            raise StageConfigError(
                f"devices {devices!r}: {entry!r} is no device; write a number (0), a comma list ('2,5'), or names as "
                "the driver gives them ('GPU-...', 'MIG-...')"
            )
    entries = [str(int(entry)) if entry.isdigit() else entry for entry in entries]
    if len(set(entries)) != len(entries):
        raise StageConfigError(f"devices {devices!r} names a device twice; name each once")
    return entries


def parse_memory(memory: str | float) -> float | int:
    """The value of `runtime.memory`: a fraction of the device (float, above 0, at most 1), or bytes (int).

    Raises:
        StageConfigError: It is neither, or so few bytes that a unit was forgotten.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)", str(memory).strip())
    try:
        number, unit = float(match[1]), _UNITS_BY_CASE[match[2].casefold()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise _memory_error(memory, "is no amount of memory") from None
    if unit == 1 and 0 < number <= 1:
        return number
    if number * unit < _LEAST_BYTES:
        raise _memory_error(memory, f"would be {number * unit:.0f} bytes")
    return int(number * unit)


def _memory_error(memory: str | float, problem: str) -> StageConfigError:
    return StageConfigError(
        f"memory {memory!r} {problem}; write a fraction of the device (0.3), or bytes with a unit ('20GiB', '512MiB')"
    )


def parse_cpus(cpus: str | int) -> list[int] | int:
    """The value of `runtime.cpus`: the cores of a list in Linux notation, sorted, or how many.

    Raises:
        StageConfigError: It is neither.
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
                f"cpus {cpus!r}: {part.strip()!r} is no range of cores; write a list ('0-3,8'), or how many without "
                "quotes (4)"
            )
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cores)


def check_placement(config: PipelineConfig) -> None:
    """Refuses what no machine could mend.

    Raises:
        StageConfigError: A value cannot be read, a stage's memory is given twice, or stages of one process contradict
            each other.
    """
    for stage in config.stage_args:
        try:
            _check_stage(stage)
        except StageConfigError as error:
            raise StageConfigError(f"stage {stage.stage_id} ({stage.name}): runtime.{error}") from error
    for process in config.processes:
        process_devices(process)
        process_cpus(process)


def _check_stage(stage: OmniStageConfig) -> None:
    runtime = stage.runtime
    if runtime.process == "":
        raise StageConfigError("process: the name is empty; write true for a process of its own")
    if runtime.devices is not None:
        parse_devices(runtime.devices)
    if runtime.cpus is not None:
        parse_cpus(runtime.cpus)
    if runtime.memory is None:
        return
    parse_memory(runtime.memory)
    if "gpu_memory_utilization" in stage.engine_args:
        raise StageConfigError("memory and engine_args.gpu_memory_utilization say the same thing; keep one of them")


def process_devices(process: list[OmniStageConfig]) -> list[str] | None:
    """The devices of the stages of one process, as `parse_devices`; None: all that there are.

    Raises:
        StageConfigError: Two of them contradict each other.
    """
    said = {s.stage_id: parse_devices(s.runtime.devices) for s in process if s.runtime.devices is not None}
    return _agreed("devices", said)


def process_cpus(process: list[OmniStageConfig]) -> list[int] | int | None:
    """The cores of the stages of one process, as `parse_cpus`; None: they say nothing.

    Raises:
        StageConfigError: Two of them contradict each other.
    """
    said = {s.stage_id: parse_cpus(s.runtime.cpus) for s in process if s.runtime.cpus is not None}
    return _agreed("cpus", said)


def _agreed(key: str, said: dict[int, _T]) -> _T | None:
    """What all who say something say."""
    (first, agreed), *others = said.items() or [(0, None)]
    for stage_id, value in others:
        if value != agreed:
            raise StageConfigError(
                f"stages {first} and {stage_id} share one process (runtime.process) but not runtime.{key}; give them "
                "the same, or say it once"
            )
    return agreed
