# SPDX-License-Identifier: Apache-2.0
"""Decides which CPU cores a stage gets, and how many threads compute there.

The parent assigns and checks the cores of all stages before anything starts; a stage's process binds itself.
"""

import math
import os
from collections.abc import Iterator

import torch
from vllm.platforms import current_platform

from vllm_omni.checkpoint_weights import weight_bytes
from vllm_omni.config.resources import instance_cpus
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig, StageInstance
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.spec import StagePlacement

_BYTES_PER_THREAD = 1 << 25
"""Of weights. A step that reads less for each thread ends no sooner, and its threads wait on cores that others need."""

_Requested = list[tuple[StageInstance, list[int] | int | None]]


def place_cores(config: PipelineConfig, model: str) -> dict[int, StagePlacement]:
    """The cores and threads of each replica, by instance id.

    A list of cores is used as it is; lists may overlap. A number gets that many of the cores that no list names, in
    order. Replicas without `runtime.cpus` share the remaining cores, on a CPU with the threads of `share_threads`; if
    no replica has it, none is bound. A user's `OMP_NUM_THREADS` overrides every number of threads.

    Args:
        model: The pipeline's checkpoint.

    Raises:
        StageConfigError: A core does not exist, or there are too few.
    """
    allowed, user_decides = sorted(os.sched_getaffinity(0)), "OMP_NUM_THREADS" in os.environ
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
            threads = None if user_decides else len(cpus)
            placements[instance.instance_id] = StagePlacement(cpus=cpus, num_threads=threads)
    others = [instance for instance, cpus in requested if cpus is None]
    cpus = free if placements and free else None
    if user_decides or not current_platform.is_cpu():
        return placements | {instance.instance_id: StagePlacement(cpus=cpus) for instance in others}
    for instance, least, most in share_threads(config, model, len(free), others):
        placements[instance.instance_id] = StagePlacement(cpus=cpus, num_threads=least, max_threads=most)
    return placements


def share_threads(
    config: PipelineConfig, model: str, num_cores: int, instances: list[StageInstance]
) -> Iterator[tuple[StageInstance, int, int]]:
    """The threads of each of these replicas, which share cores: always, and while the others wait.

    Of the bytes of weights that all of them read, a replica's part is its part of the cores; one whose weights are
    unknown has an equal part. What others do not use at the moment is for replicas each of whose operations needs all
    threads (`StageKind.spins`), if they read enough weights for them. Where there are more than two cores, or one
    replica, a core is left: an operation ends with its slowest thread, and the caller's process has work, too.
    """
    sizes = {instance.instance_id: _weight_bytes(config, model, instance.stage) for instance in instances}
    equal = max(1, num_cores // max(1, len(instances)))
    num_left = num_cores - equal * sum(not size for size in sizes.values())
    total = sum(size or 0 for size in sizes.values())
    for instance in instances:
        size = sizes[instance.instance_id]
        least = max(1, size * num_left // total) if size else equal
        most = least
        if instance.stage.kind.spins:
            most = max(1, num_cores - int(num_cores > 2 or len(instances) == 1))
            least = min(least, most)
            if size:
                most = max(least, min(most, math.ceil(size / _BYTES_PER_THREAD)))
        yield instance, least, most


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


def _weight_bytes(config: PipelineConfig, model: str, stage: OmniStageConfig) -> int | None:
    """About how many bytes of weights a step of a stage reads; None: unknown."""
    if not stage.kind.reads_weights:
        return None
    checkpoint = stage.checkpoint(model)
    return weight_bytes(
        checkpoint, stage.name, {other.name for other in config.stage_args if other.checkpoint(model) == checkpoint}
    )
