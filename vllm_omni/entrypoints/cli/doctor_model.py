# SPDX-License-Identifier: Apache-2.0
"""Whether a model's pipeline fits a machine. Only for where vLLM imports; starts nothing, loads no weights."""

from collections.abc import Iterator

import psutil

from vllm_omni.config.paths import shipped_variants
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.cli.config import read_command, resolve_command
from vllm_omni.entrypoints.cli.doctor_checks import Finding, Platform
from vllm_omni.entrypoints.cli.doctor_memory import MACHINES, Machine, MemoryPlan, MemoryPlanner, as_table
from vllm_omni.entrypoints.cli.parser import UsageError
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.entrypoints.resolve import ReadPipeline
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.cores import place_cores
from vllm_omni.stage.devices import stage_devices

_GIB = 1 << 30
_COMPUTED = "computed from its configuration, in GiB for each device; activations are estimates"


def check_model(
    arguments: list[str], platform: Platform, devices: tuple[int, ...] | None = None
) -> tuple[PipelineConfig | None, list[Finding]]:
    """
    Args:
        arguments: What would stand after `vllm serve`.
        devices: Bytes of memory of each GPU of the machine that the pipeline is to run on; None: on this machine.
    """
    try:
        parsed = OmniServeCommand().parse(arguments)
        read: ReadPipeline
        if devices is None:
            read = resolved = resolve_command(parsed)[0]
            place_cores(resolved.config)
            stage_devices(resolved.config)
        else:
            read = read_command(parsed)
    except (StageConfigError, UsageError) as error:
        return None, [Finding("FAIL", "configuration", str(error))]
    names = ", ".join(f"{stage.name} ({stage.kind})" for stage in read.loaded.stage_args)
    findings = [Finding("OK", "configuration", f"stages {names}")]
    planner = MemoryPlanner(read.with_checkpoints, parsed.args.model)
    if devices is not None:
        machine = Machine(f"{len(devices)} x {devices[0] / _GIB:.1f} GiB", devices)
        findings += _check_machine(planner, machine, read, arguments)
    elif platform.device_type != "cpu":
        machine = Machine("this machine", tuple(size for _, size in platform.devices))
        findings += _check_machine(planner, machine, read, arguments)
    else:
        findings += _check_cpu(planner)
        findings += _show_machines(planner, read, arguments)
    return read.with_checkpoints, findings


def shared_memory_needed(config: PipelineConfig) -> int:
    """Bytes that may wait for all stages together: each takes so much from its sources before they stop."""
    readers = [stage for stage in config.stage_args if stage.engine_input_source]
    return config.runtime.defaults.high_watermark_bytes * max(1, len(readers))


def _check_cpu(planner: MemoryPlanner) -> Iterator[Finding]:
    if planner.weights is None:
        yield Finding("OK", "weights", "cannot be computed")
        return
    available = psutil.virtual_memory().available
    message = f"{planner.weights / _GIB:.1f} GiB; {available / _GIB:.1f} GiB of this machine's memory are available"
    fits = planner.weights <= available
    yield Finding(
        "OK" if fits else "WARN", "weights", message, "" if fits else "use a machine with more memory, or GPUs"
    )


def _check_machine(
    planner: MemoryPlanner, machine: Machine, read: ReadPipeline, arguments: list[str]
) -> Iterator[Finding]:
    plan = planner.plan(machine)
    message = f"{plan.verdict} on {machine.name}; {_COMPUTED}:\n{as_table(plan)}"
    if not plan.problems:
        yield Finding("OK", "memory", message)
        return
    others = [name for name, other in _variants(planner, read, arguments) if other.plan(machine).verdict == "fits"]
    remedy = "\n".join([*plan.problems, *(f"or use what fits: --stage-configs-path {name}" for name in others)])
    yield Finding("FAIL", "memory", message, remedy)


def _show_machines(planner: MemoryPlanner, read: ReadPipeline, arguments: list[str]) -> Iterator[Finding]:
    """For a machine without accelerators: what the stages need, and where the shipped configurations fit."""
    plans = [planner.plan(machine) for machine in MACHINES]
    shown = next((plan for plan in plans if plan.verdict != "does not fit"), plans[-1])
    yield Finding("OK", "memory", f"on {shown.machine.name}, {_COMPUTED}:\n{as_table(shown)}")
    variants = list(_variants(planner, read, arguments))
    for machine in MACHINES:
        verdicts = [f"{name} {_short(variant.plan(machine))}" for name, variant in variants]
        yield Finding("OK", "memory", f"{machine.name}: {', '.join(verdicts)}")


def _short(plan: MemoryPlan) -> str:
    unused = len(plan.machine.devices) - len({place for stage in plan.stages for place in stage.devices})
    is_partly_used = plan.verdict == "fits" and unused > 0
    return f"{plan.verdict} (leaves {unused} unused)" if is_partly_used else plan.verdict


def _variants(planner: MemoryPlanner, read: ReadPipeline, arguments: list[str]) -> Iterator[tuple[str, MemoryPlanner]]:
    """The configuration at hand, and the others that ship for the same model, with the same arguments."""
    yield read.source.stem if read.source is not None else "the pipeline", planner
    for path in shipped_variants(read.source):
        try:
            parsed = OmniServeCommand().parse([*arguments, "--stage-configs-path", str(path)])
            config = read_command(parsed).with_checkpoints
        except StageConfigError:
            continue  # An argument that only fits the configuration at hand.
        yield path.stem, MemoryPlanner(config, parsed.args.model)
