# SPDX-License-Identifier: Apache-2.0
"""How much memory each stage takes: `runtime.memory` as engine arguments; the sum is checked before anything starts.

On an accelerator a budget is the limit of a stage on its device: vLLM gives the KV cache what remains of it, and for a
diffusion stage or one-step generation it is a hard limit. On a CPU it is the KV cache only: vLLM's CPU worker accounts
for nothing else.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
from vllm.config import CacheConfig
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

from vllm_omni.config.resources import parse_memory
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig, StageInstance
from vllm_omni.engine.engine_args import CPU_KV_CACHE_BYTES
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.devices import stage_devices, visible_devices

_GIB = 1 << 30
_ROUNDING = 1e-6
_DEFAULT = "vLLM's default"
# vLLM's older setting for the KV cache on a CPU, in GiB; it overrides everything.
_CPU_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class _Claim:
    """What one replica takes of one device.

    Attributes:
        amount: A fraction of an accelerator, or bytes on a CPU.
        source: The option that set it, for messages.
    """

    instance: StageInstance
    device: str
    amount: float
    source: str


def apply_budgets(config: PipelineConfig) -> PipelineConfig:
    """Turns every stage's `runtime.memory` into engine arguments. Starts nothing and uses no device.

    The equivalent engine argument of `OmniLLM` overrides it.

    Raises:
        StageConfigError: The stages of a device need more than it has or leave nothing for one of them, or a stage's
            devices are wrong (see `stage_devices`).
    """
    if current_platform.is_cpu():
        return _apply_on_cpu(config)
    devices = stage_devices(config)
    by_stage = {
        stage_id: [device for replica in replicas for device in devices[replica.instance_id]]
        for stage_id, replicas in config.replicas.items()
    }
    config = config.with_stage_args([_with_fraction(stage, by_stage[stage.stage_id]) for stage in config.stage_args])
    by_device: dict[str, list[_Claim]] = defaultdict(list)
    for instance_id, instance in config.instances.items():
        for device in devices[instance_id]:
            by_device[device] += _claims(instance, device)
    for claims in by_device.values():
        _check_sum(claims, 1.0)
    for instance_id, instance in config.instances.items():
        for device in devices[instance_id]:
            _check_room(instance.stage, by_device[device])
    return config


# On an accelerator.


def _with_fraction(stage: OmniStageConfig, devices: Sequence[str]) -> OmniStageConfig:
    argument = stage.kind.budget_argument
    if stage.runtime.memory is None or argument is None:
        return stage
    if stage.kind.has_ray_workers and not isinstance(parse_memory(stage.runtime.memory), float):
        raise StageConfigError(
            f"{stage.label}: runtime.memory {stage.runtime.memory!r}: its workers have devices that Ray chooses; use "
            "a fraction of them"
        )
    if not devices and not stage.kind.has_ray_workers:
        return stage
    return _with_engine_args(stage, {argument: _as_fraction(stage, devices)})


def _as_fraction(stage: OmniStageConfig, devices: Sequence[str]) -> float:
    """`runtime.memory` as a fraction of the largest of the stage's devices, so that it exceeds the limit on none."""
    assert stage.runtime.memory is not None
    memory = parse_memory(stage.runtime.memory)
    if isinstance(memory, float):
        return memory
    return memory / max(_total_memory(stage, device) for device in devices)


def _total_memory(stage: OmniStageConfig, device: str) -> int:
    visible = visible_devices()
    if device not in visible or device.startswith("MIG-"):
        raise StageConfigError(
            f"{stage.label}: runtime.memory {stage.runtime.memory!r}: the size of device {device} is unknown; "
            "use a fraction of it, or name the device by its number"
        )
    return current_platform.get_device_total_memory(visible.index(device))


def _claims(instance: StageInstance, device: str) -> list[_Claim]:
    stage = instance.stage
    if (argument := stage.kind.budget_argument) is None:
        if stage.runtime.memory is None:
            return []
        return [_Claim(instance, device, _as_fraction(stage, [device]), "runtime.memory")]
    fraction = _number(stage, argument)
    if fraction is None:
        return [_Claim(instance, device, CacheConfig.gpu_memory_utilization, _DEFAULT)]
    return [_Claim(instance, device, fraction, f"{argument}, or runtime.memory")]


def _check_room(stage: OmniStageConfig, claims: Sequence[_Claim]) -> None:
    """A diffusion stage without a budget needs one for each vLLM stage on its device."""
    if not stage.kind.leaves_no_room or stage.runtime.memory is not None:
        return
    for claim in claims:
        if claim.source == _DEFAULT:
            raise StageConfigError(
                f"{stage.label}: shares device {claim.device} with {claim.instance.label}, which takes "
                f"{_amount(claim.amount)} of it, vLLM's default; set runtime.memory of both: a fraction (0.3), or "
                "bytes ('20GiB')"
            )


# On a CPU.


def _apply_on_cpu(config: PipelineConfig) -> PipelineConfig:
    _refuse_variable(config)
    config = config.with_stage_args([_with_kv_cache(stage) for stage in config.stage_args])
    having_cache = [instance for instance in config.instances.values() if instance.stage.kind.is_autoregressive]
    claims = [_kv_cache_claim(instance) for instance in having_cache]
    _check_sum(claims, available_memory())
    return config


def _kv_cache_claim(instance: StageInstance) -> _Claim:
    size = _number(instance.stage, "kv_cache_memory_bytes")
    if size is None:
        return _Claim(instance, "", CPU_KV_CACHE_BYTES, "KV cache: the default")
    return _Claim(instance, "", size, "KV cache: kv_cache_memory_bytes, or runtime.memory")


def _with_kv_cache(stage: OmniStageConfig) -> OmniStageConfig:
    # A one-step stage has no KV cache.
    if stage.runtime.memory is None or not stage.kind.is_autoregressive:
        return stage
    memory = parse_memory(stage.runtime.memory)
    size = memory if isinstance(memory, int) else int(memory * _machine_memory())
    return _with_engine_args(stage, {"kv_cache_memory_bytes": size})


def _refuse_variable(config: PipelineConfig) -> None:
    for stage in config.stage_args:
        if stage.runtime.memory is not None and os.environ.get(_CPU_VARIABLE):
            raise StageConfigError(
                f"{stage.label}: runtime.memory has no effect while {_CPU_VARIABLE} is set; unset one of them"
            )


def _machine_memory() -> int:
    return min(psutil.virtual_memory().total, get_cgroup_memory_limit() or 1 << 62)


def available_memory() -> int:
    """Bytes of this machine that are free, at most."""
    return min(psutil.virtual_memory().available, get_cgroup_memory_limit() or 1 << 62)


# On both.


def _number(stage: OmniStageConfig, argument: str) -> float | None:
    value = stage.engine_args.get(argument)
    if value is not None and not isinstance(value, (int, float)):
        raise StageConfigError(f"{stage.label}: engine_args.{argument} must be a number, not {value!r}")
    return value


def _with_engine_args(stage: OmniStageConfig, arguments: Mapping[str, Any]) -> OmniStageConfig:
    return msgspec.structs.replace(stage, engine_args={**arguments, **stage.engine_args})


def _check_sum(claims: Sequence[_Claim], limit: float) -> None:
    total = sum(claim.amount for claim in claims)
    if total <= limit + _ROUNDING:
        return
    rows = [(claim.instance.label, _amount(claim.amount), claim.source) for claim in claims]
    rows += [("total", _amount(total), ""), ("available", _amount(limit), "")]
    width = max(len(name) for name, _, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {amount:>9}  {source}".rstrip() for name, amount, source in rows)
    where = "this machine's memory" if current_platform.is_cpu() else f"device {claims[0].device}"
    raise StageConfigError(
        f"the stages need more than {where} has:\n{table}\n"
        "set runtime.memory of each stage: a fraction (0.3), or bytes ('20GiB'); an engine argument of OmniLLM applies "
        "to all stages and overrides it, so leave it out"
    )


def _amount(amount: float) -> str:
    return f"{amount / _GIB:.2f} GiB" if current_platform.is_cpu() else f"{amount:.3f}"
