# SPDX-License-Identifier: Apache-2.0
"""How much memory each stage takes: `runtime.memory` as engine arguments, and the sum checked before anything starts.

On an accelerator a budget is all that a stage may take of its device; vLLM makes the KV cache as large as the budget
leaves room for, a diffusion stage and one that makes everything in one step get no more than it. On a CPU it is the KV
cache alone: weights lie in the same memory, but vLLM's CPU worker accounts for nothing else.
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
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.engine.engine_args import CPU_KV_CACHE_BYTES
from vllm_omni.engine.settings import SHARES_PROCESS
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.placement import stage_devices, visible_devices

_GIB = 1 << 30
_ROUNDING = 1e-6
_NOT_SAID = "vLLM's default: nothing is said"
# vLLM's older setting for the KV cache on a CPU, in GiB; it wins over everything.
_CPU_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class _Claim:
    """What one stage takes of one device.

    Attributes:
        amount: A fraction of an accelerator, or bytes on a CPU.
        source: Who said so, for messages.
    """

    stage: OmniStageConfig
    device: str
    amount: float
    source: str


def apply_budgets(config: PipelineConfig) -> PipelineConfig:
    """Turns every stage's `runtime.memory` into engine arguments. Starts nothing and touches no device.

    An engine argument that says the same thing, given to `OmniLLM`, wins.

    Raises:
        StageConfigError: The stages of a device want more than it has or leave nothing for one of them, or a stage's
            devices are wrong (see `stage_devices`).
    """
    if current_platform.is_cpu():
        return _apply_on_cpu(config)
    _check_processes(config)
    config = config.with_stage_args([_note_shared_process(stage, config) for stage in config.stage_args])
    devices = stage_devices(config)
    config = config.with_stage_args([_with_fraction(stage, devices[stage.stage_id]) for stage in config.stage_args])
    by_device: dict[str, list[_Claim]] = defaultdict(list)
    for stage in config.stage_args:
        for device in devices[stage.stage_id]:
            by_device[device] += _claims(stage, device)
    for claims in by_device.values():
        _check_sum(claims, 1.0)
    for stage in config.stage_args:
        for device in devices[stage.stage_id]:
            _check_room(stage, by_device[device])
    return config


# On an accelerator.


def _note_shared_process(stage: OmniStageConfig, config: PipelineConfig) -> OmniStageConfig:
    """Leaves a one-step stage that shares its process without a limit, which would hold for the others too."""
    (stages,) = [stages for stages in config.processes if stage in stages]
    if stage.kind != "generation" or len(stages) == 1:
        return stage
    additional = {**(stage.engine_args.get("additional_config") or {}), SHARES_PROCESS: True}
    return msgspec.structs.replace(stage, engine_args={**stage.engine_args, "additional_config": additional})


def _with_fraction(stage: OmniStageConfig, devices: Sequence[str]) -> OmniStageConfig:
    if stage.runtime.memory is None or not stage.runs_vllm:
        return stage
    return _with_engine_args(stage, {"gpu_memory_utilization": _as_fraction(stage, devices)})


def _as_fraction(stage: OmniStageConfig, devices: Sequence[str]) -> float:
    """`runtime.memory` as a fraction of the largest of the stage's devices, so that it takes no more of any."""
    assert stage.runtime.memory is not None
    memory = parse_memory(stage.runtime.memory)
    if isinstance(memory, float):
        return memory
    return memory / max(_total_memory(stage, device) for device in devices)


def _total_memory(stage: OmniStageConfig, device: str) -> int:
    visible = visible_devices()
    if device not in visible or device.startswith("MIG-"):
        raise StageConfigError(
            f"{_label(stage)}: runtime.memory {stage.runtime.memory!r}: how large device {device} is cannot be asked; "
            "write a fraction of it, or name the device by its number"
        )
    return current_platform.get_device_total_memory(visible.index(device))


def _claims(stage: OmniStageConfig, device: str) -> list[_Claim]:
    if not stage.runs_vllm:
        if stage.runtime.memory is None:
            return []
        return [_Claim(stage, device, _as_fraction(stage, [device]), "runtime.memory")]
    fraction = _number(stage, "gpu_memory_utilization")
    if fraction is None:
        return [_Claim(stage, device, CacheConfig.gpu_memory_utilization, _NOT_SAID)]
    return [_Claim(stage, device, fraction, "gpu_memory_utilization, or runtime.memory")]


def _check_processes(config: PipelineConfig) -> None:
    """What a diffusion stage may take is enforced for its process."""
    for stages in config.processes:
        for stage in stages:
            if len(stages) > 1 and stage.kind == "DiT" and stage.runtime.memory is not None:
                others = ", ".join(_label(other) for other in stages if other is not stage)
                raise StageConfigError(
                    f"{_label(stage)}: runtime.memory would limit {others} too, in the same process; give this stage a "
                    "process of its own (runtime.process: true), or leave memory out"
                )


def _check_room(stage: OmniStageConfig, claims: Sequence[_Claim]) -> None:
    """A diffusion stage takes what it needs, but not beside a vLLM stage that was not told to leave anything."""
    if stage.kind != "DiT" or stage.runtime.memory is not None:
        return
    for claim in claims:
        if claim.source == _NOT_SAID:
            raise StageConfigError(
                f"{_label(stage)}: shares device {claim.device} with {_label(claim.stage)}, which takes "
                f"{_amount(claim.amount)} of it, vLLM's default; give both their part with runtime.memory: a fraction "
                "(0.3), or bytes ('20GiB')"
            )


# On a CPU.


def _apply_on_cpu(config: PipelineConfig) -> PipelineConfig:
    _refuse_variable(config)
    config = config.with_stage_args([_with_kv_cache(stage) for stage in config.stage_args])
    claims = [_kv_cache_claim(stage) for stage in config.stage_args if stage.kind == "AR"]
    _check_sum(claims, _available_memory())
    return config


def _kv_cache_claim(stage: OmniStageConfig) -> _Claim:
    size = _number(stage, "kv_cache_memory_bytes")
    if size is None:
        return _Claim(stage, "", CPU_KV_CACHE_BYTES, "KV cache: the default, nothing is said")
    return _Claim(stage, "", size, "KV cache: kv_cache_memory_bytes, or runtime.memory")


def _with_kv_cache(stage: OmniStageConfig) -> OmniStageConfig:
    # A stage that generates everything in one step has no KV cache.
    if stage.runtime.memory is None or stage.kind != "AR":
        return stage
    memory = parse_memory(stage.runtime.memory)
    size = memory if isinstance(memory, int) else int(memory * _machine_memory())
    return _with_engine_args(stage, {"kv_cache_memory_bytes": size})


def _refuse_variable(config: PipelineConfig) -> None:
    for stage in config.stage_args:
        if stage.runtime.memory is not None and os.environ.get(_CPU_VARIABLE):
            raise StageConfigError(
                f"{_label(stage)}: runtime.memory has no effect while {_CPU_VARIABLE} is set; unset one of them"
            )


def _machine_memory() -> int:
    return min(psutil.virtual_memory().total, get_cgroup_memory_limit() or 1 << 62)


def _available_memory() -> int:
    return min(psutil.virtual_memory().available, get_cgroup_memory_limit() or 1 << 62)


# On both.


def _number(stage: OmniStageConfig, argument: str) -> float | None:
    value = stage.engine_args.get(argument)
    if value is not None and not isinstance(value, (int, float)):
        raise StageConfigError(f"{_label(stage)}: engine_args.{argument} must be a number, not {value!r}")
    return value


def _with_engine_args(stage: OmniStageConfig, arguments: Mapping[str, Any]) -> OmniStageConfig:
    return msgspec.structs.replace(stage, engine_args={**arguments, **stage.engine_args})


def _check_sum(claims: Sequence[_Claim], limit: float) -> None:
    total = sum(claim.amount for claim in claims)
    if total <= limit + _ROUNDING:
        return
    rows = [(_label(claim.stage), _amount(claim.amount), claim.source) for claim in claims]
    rows += [("together", _amount(total), ""), ("there is", _amount(limit), "")]
    width = max(len(name) for name, _, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {amount:>9}  {source}".rstrip() for name, amount, source in rows)
    where = "this machine's memory" if current_platform.is_cpu() else f"device {claims[0].device}"
    raise StageConfigError(
        f"the stages want more than {where} has:\n{table}\n"
        "give each of them its part with runtime.memory: a fraction (0.3), or bytes ('20GiB'); an engine argument "
        "given to OmniLLM for all stages wins over that, so leave it out"
    )


def _amount(amount: float) -> str:
    return f"{amount / _GIB:.2f} GiB" if current_platform.is_cpu() else f"{amount:.3f}"


def _label(stage: OmniStageConfig) -> str:
    return f"stage {stage.stage_id} ({stage.name})"
