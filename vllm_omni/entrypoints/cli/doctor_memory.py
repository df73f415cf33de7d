# SPDX-License-Identifier: Apache-2.0
"""Whether a pipeline's stages fit into the memory of a machine with accelerators, which need not be this one.

What a stage needs is computed by `stage.memory_needs`; what it may take is its budget: `runtime.memory` or
`gpu_memory_utilization`. Starts nothing, touches no device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm.config import CacheConfig

from vllm_omni.config.placement import parse_memory, process_devices
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.devices import num_devices
from vllm_omni.stage.memory_needs import CONTEXT_BYTES, StageNeeds, stage_needs

_GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        name: For messages.
        devices: Bytes of memory of each accelerator, as its driver reports them.
    """

    name: str
    devices: tuple[int, ...]


def _published(name: str, count: int, gib: float) -> Machine:
    return Machine(name, (int(gib * _GIB),) * count)


MACHINES = (
    _published("1 x 24 GB", 1, 22.0),
    _published("1 x 48 GB", 1, 44.4),
    _published("1 x 80 GB", 1, 79.1),
    _published("2 x 80 GB", 2, 79.1),
    _published("1 x 141 GB", 1, 139.7),
)
"""Common machines. CUDA reports less memory than the name says (L4, L40S, A100 and H100, H200)."""

Verdict = Literal["fits", "does not fit", "not known"]


@dataclass(frozen=True)
class StagePlan:
    """One stage on a machine; all bytes are those of each of its devices.

    Attributes:
        devices: Places in the machine.
        needs: None where they cannot be computed, see `error`.
        budget: All that the stage may take; None where nothing limits it.
    """

    stage: OmniStageConfig
    devices: Sequence[int]
    needs: StageNeeds | None
    budget: int | None
    error: str = ""

    @property
    def needed(self) -> int:
        return 0 if self.needs is None else self.needs.total // len(self.devices)

    @property
    def room(self) -> int:
        """Tokens that fit into the KV cache, of all requests together."""
        if self.needs is None or self.budget is None or not self.needs.kv_token:
            return 0
        free = self.budget * len(self.devices) - self.needs.without_kv_cache
        return max(0, int(free / self.needs.kv_token))

    @property
    def exceeds_budget(self) -> bool:
        return self.budget is not None and self.needed > self.budget


@dataclass(frozen=True)
class MemoryPlan:
    """A pipeline on a machine.

    Attributes:
        problems: What does not fit, each with what to change.
    """

    machine: Machine
    stages: list[StagePlan]
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if self.problems:
            return "does not fit"
        is_known = all(not s.error and (s.needs is None or s.needs.activations is not None) for s in self.stages)
        return "fits" if is_known else "not known"


class MemoryPlanner:
    """Plans one pipeline on any number of machines; what its stages need is computed once.

    Raises:
        StageConfigError: A stage's devices contradict each other.
    """

    def __init__(self, config: PipelineConfig, model: str) -> None:
        self._config = config
        self._needs = {stage.stage_id: _compute(config, stage, model) for stage in config.stage_args}

    @property
    def weights(self) -> int | None:
        """Bytes of all stages' weights; None where one cannot be computed."""
        if any(error for _, error in self._needs.values()):
            return None
        return sum(needs.weights for needs, _ in self._needs.values() if needs is not None)

    def plan(self, machine: Machine) -> MemoryPlan:
        stages = []
        for process in self._config.processes:
            named = process_devices(process)
            for stage in process:
                needs, error = self._needs[stage.stage_id]
                entries = named or [str(place) for place in range(num_devices(stage))]
                if not all(entry.isdigit() for entry in entries):
                    needs, error = None, f"runtime.devices {','.join(entries)}: devices are counted by number only"
                places = [int(entry) for entry in entries if entry.isdigit()]
                stages.append(StagePlan(stage, places, needs, _budget(stage, places, machine), error))
        stages.sort(key=lambda plan: plan.stage.stage_id)
        return MemoryPlan(machine, stages, list(_problems(stages, machine, self._config)))


def _compute(config: PipelineConfig, stage: OmniStageConfig, model: str) -> tuple[StageNeeds | None, str]:
    try:
        return stage_needs(config, stage, model), ""
    except StageConfigError as error:
        return None, str(error)
    except Exception as error:  # The model's own code, and vLLM's, for a device that may not be here.
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _budget(stage: OmniStageConfig, places: Sequence[int], machine: Machine) -> int | None:
    if any(place >= len(machine.devices) for place in places) or not places:
        return None
    size = min(machine.devices[place] for place in places)
    if stage.runtime.memory is not None:
        memory = parse_memory(stage.runtime.memory)
        return memory if isinstance(memory, int) else int(memory * size)
    if not stage.runs_vllm:
        return None
    return int(stage.engine_args.get("gpu_memory_utilization", CacheConfig.gpu_memory_utilization) * size)


def _problems(stages: Sequence[StagePlan], machine: Machine, config: PipelineConfig) -> Iterator[str]:
    count = len(machine.devices)
    for plan in stages:
        if any(place >= count for place in plan.devices):
            needed = max(plan.devices) + 1
            yield f"{plan.stage.name} needs device {max(plan.devices)}: {needed} devices, and there are {count}"
        elif plan.exceeds_budget:
            yield _shortage(plan)
    for place, size in enumerate(machine.devices):
        on_device = [plan for plan in stages if place in plan.devices]
        taken = sum(plan.needed if plan.budget is None else plan.budget for plan in on_device)
        contexts = CONTEXT_BYTES * sum(
            any(plan.stage in process for plan in on_device if plan.needs is not None or plan.error)
            for process in config.processes
        )
        if taken + contexts > size:
            yield (
                f"device {place} has {_gib(size)} GiB; the stages take {_gib(taken)} GiB, and their processes "
                f"{_gib(contexts)} GiB more: lower runtime.memory or gpu_memory_utilization, or use more devices"
            )


def _shortage(plan: StagePlan) -> str:
    assert plan.needs is not None and plan.budget is not None
    flag = f"--stage.{plan.stage.name}"
    message = f"{plan.stage.name} needs {_gib(plan.needed)} GiB, and its budget is {_gib(plan.budget)} GiB; "
    if plan.room:
        message += f"lower {flag}.max_model_len (its KV cache has room for {plan.room:,} tokens), or "
    message += f"give it more (--stage.{plan.stage.name}.runtime.memory), or several devices (tensor_parallel_size)"
    return message + (f", or fewer bits ({flag}.quantization fp8)" if plan.stage.runs_vllm else "")


def as_table(plan: MemoryPlan) -> str:
    """The stages of a plan, in GiB of each device."""
    rows: list[tuple[str, ...]] = [
        ("stage", "devices", "weights", "activations", "KV cache", "other", "needs", "budget", "")
    ]
    rows += [_row(stage) for stage in plan.stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(plan: StagePlan) -> tuple[str, ...]:
    name, devices = plan.stage.name, ",".join(map(str, plan.devices))
    budget = "-" if plan.budget is None else _gib(plan.budget)
    if plan.needs is None:
        return name, devices, "-", "-", "-", "-", "-", budget, plan.error and f"not computed: {plan.error}"
    needs, count = plan.needs, len(plan.devices)
    cache = _gib(needs.kv_request / count) if needs.kv_token else "-"
    if needs.activations is None:
        activations, note = "-", "activations are not computed: they depend on the requests"
    else:
        activations, note = _gib(needs.activations / count), _room(plan) if needs.kv_token else ""
    parts = (_gib(needs.weights / count), activations, cache, _gib(needs.overhead / count), _gib(plan.needed))
    return name, devices, *parts, budget, note


def _room(plan: StagePlan) -> str:
    assert plan.needs is not None
    longest = plan.needs.max_model_len
    return f"KV cache for {plan.room:,} tokens: {plan.room / longest:.1f} requests of {longest:,}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}"
