# SPDX-License-Identifier: Apache-2.0
"""Decides which accelerators a stage gets.

The parent resolves and checks all devices before anything starts; a stage's process sets its own before it uses one.
`placement.budgets` decides how much memory a stage takes there.
"""

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from vllm.platforms import current_platform

from vllm_omni.config.resources import instance_devices, parse_devices
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)


def set_stage_gpu_devices(devices: str | int | None, stage: str = "this process") -> None:
    """Makes only these accelerators visible to this process, in this order. Uses none of them.

    Sets the environment variable of vLLM's platform (`CUDA_VISIBLE_DEVICES` on CUDA), which reaches child processes
    too. On a CPU it does nothing.

    Args:
        devices: A comma list (`"2,5,7"`), or one number or digit string. Numbers count the devices that are visible to
            this process: if the variable is `"4,5,6"`, `1` is `5`. Names (`GPU-...`, `MIG-...`) are used as they are.
            None changes nothing.
        stage: The stage's label, for messages.

    Raises:
        StageConfigError: A device does not exist, or is named twice.
        RuntimeError: A device was used in this process or its parent before.
    """
    if devices is None:
        return
    if current_platform.is_cpu():
        logger.debug("%s: devices %r have no effect on a CPU", stage, devices)
        return
    names = resolve_devices(parse_devices(devices), visible_devices(), stage)
    # A process that has used CUDA keeps the devices that it saw then, and one that is forked from it cannot use any.
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise RuntimeError(f"{stage}: a device was used before its devices {devices!r} were chosen; choose them first")
    os.environ[current_platform.device_control_env_var] = ",".join(names)


def visible_devices() -> list[str]:
    """The accelerators that are visible to this process, by their names in the platform's variable."""
    value = os.environ.get(current_platform.device_control_env_var)
    if value:
        return [name.strip() for name in value.split(",")]
    return [str(index) for index in range(current_platform.device_count())]


def resolve_devices(entries: Sequence[str], visible: Sequence[str], stage: str) -> list[str]:
    """Names of devices, for entries that are indices in `visible` or names.

    Raises:
        StageConfigError: An entry is out of range, or two are the same device.
    """
    names = []
    for entry in entries:
        if entry.isdigit() and int(entry) >= len(visible):
            raise StageConfigError(f"{stage}: runtime.devices names device {entry}, but {_describe(visible)}")
        names.append(visible[int(entry)] if entry.isdigit() else entry)
    if len(set(names)) != len(names):
        raise StageConfigError(
            f"{stage}: runtime.devices {','.join(entries)!r} means {','.join(names)}: one device twice; name each once"
        )
    return names


def _describe(visible: Sequence[str]) -> str:
    variable = current_platform.device_control_env_var
    how = f"{variable} is {os.environ[variable]!r}" if variable in os.environ else f"{variable} is not set"
    if not visible:
        return f"this process sees none ({how}); check the driver and the variable"
    return f"this process sees {len(visible)} ({how}); use a number below {len(visible)}, or make more visible"


def stage_devices(config: PipelineConfig) -> dict[int, list[str]]:
    """The devices of each replica, by instance id; empty lists on a CPU.

    A stage without `runtime.devices` uses the first visible ones.

    Raises:
        StageConfigError: A device does not exist, or a vLLM or diffusion stage uses more or fewer than are named.
    """
    if current_platform.is_cpu():
        return {instance_id: [] for instance_id in config.instances}
    visible, found = visible_devices(), {}
    for instance in config.instances.values():
        entries, label, stage = instance_devices(instance), instance.label, instance.stage
        width = num_devices(stage)
        names = resolve_devices(entries or [str(i) for i in range(width)], visible, label)
        if entries and stage.kind.parallel_sizes and len(names) != width:
            product = " x ".join(stage.kind.parallel_sizes)
            raise StageConfigError(
                f"{label}: runtime.devices names {len(names)} ({', '.join(entries)}), but its engine takes {width} "
                f"({product}); make the two equal"
            )
        found[instance.instance_id] = names
    return found


def num_devices(stage: OmniStageConfig) -> int:
    """How many devices a stage's process takes; none where Ray starts the workers of its engine."""
    return 0 if stage.kind.has_ray_workers else world_size(stage)


def world_size(stage: OmniStageConfig) -> int:
    """How many devices, and workers, a stage's engine has: vLLM's `world_size`, or `DiTConfig`'s."""
    return math.prod(stage.engine_args.get(name, 1) for name in stage.kind.parallel_sizes)


@contextlib.contextmanager
def alone_on_devices(run_dir: str, stage: OmniStageConfig) -> Iterator[None]:
    """Locks this stage's devices against starts of the pipeline's other stages. Does nothing on a CPU.

    vLLM sizes a KV cache by the difference of the device's free memory before loading weights and after a profiling
    run. Memory that another stage allocates in between would be counted as this stage's, and the size of the KV cache
    would depend on the order. Call it after `set_stage_gpu_devices`.
    """
    names = [] if current_platform.is_cpu() else visible_devices()[: num_devices(stage)]
    with contextlib.ExitStack() as held:
        for name in sorted(names):  # The same order everywhere: no deadlock.
            lock = held.enter_context(open(Path(run_dir, f"device-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released when the process ends.
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # Closing is not enough: forked workers may hold the file.
        yield
