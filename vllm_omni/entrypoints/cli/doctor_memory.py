# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor MODEL`: whether a pipeline fits into the memory of this machine or another one.

`placement.memory_needs` computes what a stage needs; `runtime.memory` or `gpu_memory_utilization` is its budget.
Requires a working vLLM; starts nothing, loads no weights, touches no device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import psutil
from vllm.config import CacheConfig

from vllm_omni.config.resources import instance_devices, parse_memory
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig, StageInstance
from vllm_omni.config.utils import shipped_variants
from vllm_omni.engine.engine_args import OmniEngineSettings
from vllm_omni.entrypoints.cli.findings import Finding, Platform
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_omni_args
from vllm_omni.entrypoints.resolve import ReadPipeline, ResolvedPipeline, read_pipeline, resolve_pipeline
from vllm_omni.errors import StageConfigError, UsageError
from vllm_omni.placement.cores import place_cores
from vllm_omni.placement.devices import stage_devices, world_size
from vllm_omni.placement.memory_needs import CONTEXT_BYTES, StageNeeds, stage_needs

_GIB = 1 << 30
_COMPUTED = "computed from its configuration, in GiB for each device; activations are estimates"


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        name: For messages.
        devices: Bytes of memory of each accelerator, as its driver reports them.
    """

    name: str
    devices: tuple[int, ...]


MACHINES = tuple(
    Machine(name, (int(gib * _GIB),) * count)
    for name, count, gib in (
        ("1 x 24 GB", 1, 22.0),
        ("1 x 48 GB", 1, 44.4),
        ("1 x 80 GB", 1, 79.1),
        ("2 x 80 GB", 2, 79.1),
        ("1 x 141 GB", 1, 139.7),
    )
)
"""Common machines. CUDA reports less memory than the name says (L4, L40S, A100 and H100, H200)."""

Verdict = Literal["fits", "does not fit", "not known"]


@dataclass(frozen=True)
class StagePlan:
    """One stage on a machine; all bytes are those of each of its devices.

    Attributes:
        devices: Indices of the machine's devices.
        needs: None if they cannot be computed, see `error`.
        budget: Upper bound of the stage's memory; None: no bound.
    """

    instance: StageInstance
    devices: Sequence[int]
    needs: StageNeeds | None
    budget: int | None
    error: str = ""

    @property
    def stage(self) -> OmniStageConfig:
        return self.instance.stage

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
        problems: What does not fit, each with a remedy.
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
    """Plans one pipeline on any number of machines; the needs of its stages are computed once.

    Raises:
        StageConfigError: Stages of one process have different devices.
    """

    def __init__(self, config: PipelineConfig, model: str) -> None:
        self._config = config
        self._needs = {stage.stage_id: _compute(config, stage, model) for stage in config.stage_args}

    @property
    def weights(self) -> int | None:
        """Bytes of all stages' weights; None if those of a stage cannot be computed."""
        if any(error for _, error in self._needs.values()):
            return None
        counted = ((self._needs[instance.stage.stage_id][0]) for instance in self._config.instances.values())
        return sum(needs.weights for needs in counted if needs is not None)

    def plan(self, machine: Machine) -> MemoryPlan:
        stages = []
        for instance in self._config.instances.values():
            stage = instance.stage
            needs, error = self._needs[stage.stage_id]
            entries = instance_devices(instance) or [str(index) for index in range(world_size(stage))]
            if not all(entry.isdigit() for entry in entries):
                needs, error = None, f"runtime.devices {','.join(entries)}: give devices by number to check them"
            devices = [int(entry) for entry in entries if entry.isdigit()]
            stages.append(StagePlan(instance, devices, needs, _budget(stage, devices, machine), error))
        stages.sort(key=lambda plan: (plan.stage.stage_id, plan.instance.replica))
        return MemoryPlan(machine, stages, list(_problems(stages, machine)))


def _compute(config: PipelineConfig, stage: OmniStageConfig, model: str) -> tuple[StageNeeds | None, str]:
    try:
        return stage_needs(config, stage, model), ""
    except StageConfigError as error:
        return None, str(error)
    except Exception as error:  # Code of the model or vLLM, for a device that may be missing here.
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _budget(stage: OmniStageConfig, devices: Sequence[int], machine: Machine) -> int | None:
    if any(device >= len(machine.devices) for device in devices) or not devices:
        return None
    size = min(machine.devices[device] for device in devices)
    if stage.runtime.memory is not None:
        memory = parse_memory(stage.runtime.memory)
        return memory if isinstance(memory, int) else int(memory * size)
    if (argument := stage.kind.budget_argument) is None:
        return None
    return int(stage.engine_args.get(argument, CacheConfig.gpu_memory_utilization) * size)


def _problems(stages: Sequence[StagePlan], machine: Machine) -> Iterator[str]:
    count = len(machine.devices)
    for plan in stages:
        if any(device >= count for device in plan.devices):
            needed = max(plan.devices) + 1
            yield f"{plan.instance.name} needs device {max(plan.devices)}: {needed} devices, and there are {count}"
        elif plan.exceeds_budget:
            yield _shortage(plan)
    for device, size in enumerate(machine.devices):
        on_device = [plan for plan in stages if device in plan.devices]
        taken = sum(plan.needed if plan.budget is None else plan.budget for plan in on_device)
        contexts = CONTEXT_BYTES * sum(plan.needs is not None or bool(plan.error) for plan in on_device)
        if taken + contexts > size:
            yield (
                f"device {device} has {_gib(size)} GiB; the stages take {_gib(taken)} GiB, and their processes "
                f"{_gib(contexts)} GiB more: lower runtime.memory or gpu_memory_utilization, or use more devices"
            )


def _shortage(plan: StagePlan) -> str:
    assert plan.needs is not None and plan.budget is not None
    flag = f"--stage.{plan.stage.name}"
    message = f"{plan.stage.name} needs {_gib(plan.needed)} GiB, and its budget is {_gib(plan.budget)} GiB; "
    if plan.room:
        message += f"lower {flag}.max_model_len (its KV cache has room for {plan.room:,} tokens), or "
    message += f"raise its budget ({flag}.runtime.memory), or use several devices (tensor_parallel_size)"
    quantization = plan.stage.kind.quantization
    return message + (f", or fewer bits ({flag}.quantization {quantization})" if quantization else "")


def as_table(plan: MemoryPlan) -> str:
    """The stages of a plan, in GiB of each device."""
    rows: list[tuple[str, ...]] = [
        ("stage", "devices", "weights", "activations", "KV cache", "other", "needs", "budget", "")
    ]
    rows += [_row(stage) for stage in plan.stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(plan: StagePlan) -> tuple[str, ...]:
    name, devices = plan.instance.name, ",".join(map(str, plan.devices))
    budget = "-" if plan.budget is None else _gib(plan.budget)
    if plan.needs is None:
        return name, devices, "-", "-", "-", "-", "-", budget, plan.error and f"not computed: {plan.error}"
    needs, count = plan.needs, len(plan.devices)
    cache = _gib(needs.kv_request / count) if needs.kv_token else "-"
    if needs.activations is None:
        activations, note = "-", "activations are not computed: they depend on the requests"
    else:
        activations, note = _gib(needs.activations / count), ""
        if needs.kv_token:
            longest = needs.max_model_len
            note = f"KV cache for {plan.room:,} tokens: {plan.room / longest:.1f} requests of {longest:,}"
    parts = (_gib(needs.weights / count), activations, cache, _gib(needs.overhead / count), _gib(plan.needed))
    return name, devices, *parts, budget, note


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}"


def check_model(
    arguments: list[str], platform: Platform, devices: tuple[int, ...] | None = None
) -> tuple[PipelineConfig | None, dict[str, int | str], list[Finding]]:
    """
    Args:
        arguments: The words after `vllm serve`.
        devices: Bytes of memory of each GPU of the machine that the pipeline would run on; None: this machine.

    Returns:
        The pipeline, if it has one; the threads of each replica on this machine, by its name, of those for which torch
        does not decide; what was found.
    """
    read: ReadPipeline
    threads: dict[str, int | str] = {}
    try:
        args = make_omni_args(OmniServeCommand().parse(arguments))
        if devices is None:
            read = resolved = resolve_pipeline(args)
            instances = resolved.config.instances
            placements = sorted(place_cores(resolved.config, args.model).items())
            threads = {instances[key].name: found.threads for key, found in placements if found.threads is not None}
            stage_devices(resolved.config)
        else:
            read = read_pipeline(args)
    except (StageConfigError, UsageError) as error:
        return None, {}, [Finding("FAIL", "configuration", str(error))]
    names = ", ".join(f"{stage.name} ({stage.kind.name})" for stage in read.with_arguments.stage_args)
    findings = [Finding("OK", "configuration", f"stages {names}")]
    if devices is None:
        for stage in resolved.config.stage_args:
            if (python := stage.kind.describe_python()) is not None:
                findings.append(Finding("OK", "python", f"{stage.label}: {python}"))
    planner = MemoryPlanner(read.with_checkpoints, args.model)
    if devices is not None:
        machine = Machine(f"{len(devices)} x {devices[0] / _GIB:.1f} GiB", devices)
        findings += _check_machine(planner, machine, read, arguments)
    elif platform.device_type != "cpu":
        machine = Machine("this machine", tuple(size for _, size in platform.devices))
        findings += _check_machine(planner, machine, read, arguments)
    else:
        findings += _check_cpu(planner, resolved)
        findings += _show_machines(planner, read, arguments)
    return read.with_checkpoints, threads, findings


def shared_memory_needed(config: PipelineConfig) -> int:
    """Bytes that may wait for all stages together: up to the watermark in each stage with sources."""
    consumers = [instance for instance in config.instances.values() if instance.stage.engine_input_source]
    return config.runtime.defaults.high_watermark_bytes * max(1, len(consumers))


def _check_cpu(planner: MemoryPlanner, resolved: ResolvedPipeline) -> Iterator[Finding]:
    settings = map(OmniEngineSettings.from_vllm_config, resolved.engine_args)
    int8 = "".join(f"; {each.model_stage} in int8" for each in settings if each.int8_weights)
    if planner.weights is None:
        yield Finding("OK", "weights", f"cannot be computed{int8}")
        return
    available = psutil.virtual_memory().available
    free = f"{available / _GIB:.1f} GiB of this machine's memory are available"
    message = f"{planner.weights / _GIB:.1f} GiB{int8}; {free}"
    if planner.weights <= available:
        yield Finding("OK", "weights", message)
    else:
        yield Finding("WARN", "weights", message, "use a machine with more memory, or GPUs")


def _check_machine(
    planner: MemoryPlanner, machine: Machine, read: ReadPipeline, arguments: list[str]
) -> Iterator[Finding]:
    plan = planner.plan(machine)
    message = f"{plan.verdict} on {machine.name}; {_COMPUTED}:\n{as_table(plan)}"
    if not plan.problems:
        yield Finding("OK", "memory", message)
        return
    others = [name for name, other in _variants(planner, read, arguments) if other.plan(machine).verdict == "fits"]
    remedy = "\n".join([*plan.problems, *(f"or use one that fits: --stage-configs-path {name}" for name in others)])
    yield Finding("FAIL", "memory", message, remedy)


def _show_machines(planner: MemoryPlanner, read: ReadPipeline, arguments: list[str]) -> Iterator[Finding]:
    """Shows what the stages need, and where the shipped configurations fit, on a machine without accelerators."""
    plans = [planner.plan(machine) for machine in MACHINES]
    shown = next((plan for plan in plans if plan.verdict != "does not fit"), plans[-1])
    yield Finding("OK", "memory", f"on {shown.machine.name}, {_COMPUTED}:\n{as_table(shown)}")
    variants = list(_variants(planner, read, arguments))
    for machine in MACHINES:
        verdicts = [f"{name} {_short_verdict(variant.plan(machine))}" for name, variant in variants]
        yield Finding("OK", "memory", f"{machine.name}: {', '.join(verdicts)}")


def _short_verdict(plan: MemoryPlan) -> str:
    unused = len(plan.machine.devices) - len({device for stage in plan.stages for device in stage.devices})
    is_partly_used = plan.verdict == "fits" and unused > 0
    return f"{plan.verdict} (leaves {unused} unused)" if is_partly_used else plan.verdict


def _variants(planner: MemoryPlanner, read: ReadPipeline, arguments: list[str]) -> Iterator[tuple[str, MemoryPlanner]]:
    """This configuration, and the others that ship for the same model, with the same arguments."""
    yield read.source.stem if read.source is not None else "the pipeline", planner
    for path in shipped_variants(read.source):
        try:
            args = make_omni_args(OmniServeCommand().parse([*arguments, "--stage-configs-path", str(path)]))
            config = read_pipeline(args).with_checkpoints
        except StageConfigError:
            continue  # An argument that only fits this configuration.
        yield path.stem, MemoryPlanner(config, args.model)
