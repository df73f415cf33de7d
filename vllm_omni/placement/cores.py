# SPDX-License-Identifier: Apache-2.0
"""Decides which CPU cores a stage gets, and how many threads compute there.

The parent assigns and checks the cores of all stages before anything starts; a stage's process binds itself.
"""

import os

import torch
from vllm.platforms import current_platform

from vllm_omni.config.resources import instance_cpus
from vllm_omni.config.stage_config import PipelineConfig, StageInstance
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.spec import StagePlacement

_Requested = list[tuple[StageInstance, list[int] | int | None]]


def place_cores(config: PipelineConfig) -> dict[int, StagePlacement]:
    """The cores and threads of each replica, by instance id.

    A list of cores is used as it is; lists may overlap. A number gets that many of the cores that no list names, in
    order. Replicas without `runtime.cpus` share the remaining cores, with an equal part of the threads on a CPU; if no
    replica has it, none is bound. A single one with a vLLM engine leaves a core to the caller's process and to its own
    IO thread, as vLLM does. A user's `OMP_NUM_THREADS` overrides every number of threads.

    Raises:
        StageConfigError: A core does not exist, or there are too few.
    """
    allowed = sorted(os.sched_getaffinity(0))
    requested: _Requested = [(instance, instance_cpus(instance)) for instance in config.instances.values()]
    listed = {core for _, cpus in requested if isinstance(cpus, list) for core in cpus}
    free = [core for core in allowed if core not in listed]
    _check_lists(requested, allowed)
    _check_numbers(requested, free, allowed)
    placements: dict[int, StagePlacement] = {}
    for instance, cpus in requested:
        if isinstance(cpus, int):
            number = cpus
            cpus, free = free[:number], free[number:]
        if cpus is not None:
            placements[instance.instance_id] = StagePlacement(cpus=cpus, num_threads=_num_threads(len(cpus)))
    others = [instance for instance, cpus in requested if cpus is None]
    rest = StagePlacement(cpus=free if placements and free else None, num_threads=_share(len(free), others))
    return placements | {instance.instance_id: rest for instance in others}


def bind_cores(placement: StagePlacement) -> None:
    """Binds this process. Call it while the process has one thread: only later threads inherit the cores."""
    if placement.cpus is not None:
        os.sched_setaffinity(0, placement.cpus)
    if placement.num_threads is not None:
        torch.set_num_threads(placement.num_threads)


def _check_lists(requested: _Requested, allowed: list[int]) -> None:
    for instance, cpus in requested:
        unknown = set(cpus) - set(allowed) if isinstance(cpus, list) else set()
        if unknown:
            raise StageConfigError(
                f"{instance.label}: runtime.cpus names {_join(unknown)}, but this process may run on "
                f"{_join(allowed)} only; name some of these"
            )


def _check_numbers(requested: _Requested, free: list[int], allowed: list[int]) -> None:
    wanted = {instance.name: cpus for instance, cpus in requested if isinstance(cpus, int)}
    if sum(wanted.values()) > len(free):
        each = ", ".join(f"{name} {number}" for name, number in wanted.items())
        raise StageConfigError(
            f"runtime.cpus: the stages need {sum(wanted.values())} cores ({each}), but of {len(allowed)} that this "
            f"process may use {len(free)} are left for them; set smaller numbers"
        )


def _join(numbers: set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _share(num_cores: int, instances: list[StageInstance]) -> int | None:
    """Threads of each replica that shares cores. With an accelerator torch decides."""
    if not current_platform.is_cpu() or not instances:
        return None
    if len(instances) == 1 and instances[0].stage.kind.spins:
        # Its threads spin between the steps' operations: on all cores they delay everything else.
        num_cores -= 1
    return _num_threads(max(1, num_cores // len(instances)))


def _num_threads(number: int) -> int | None:
    return None if "OMP_NUM_THREADS" in os.environ else number
