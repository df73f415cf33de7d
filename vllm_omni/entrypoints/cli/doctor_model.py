# SPDX-License-Identifier: Apache-2.0
"""Whether a model's pipeline fits this machine. Only for where vLLM imports; starts nothing, loads no weights."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.cli.config import resolve_command
from vllm_omni.entrypoints.cli.doctor_checks import Finding, Platform
from vllm_omni.entrypoints.cli.parser import UsageError
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.cores import place_cores
from vllm_omni.stage.placement import stage_devices

_GIB = 1 << 30
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def check_model(arguments: list[str], platform: Platform) -> tuple[PipelineConfig | None, list[Finding]]:
    """
    Args:
        arguments: What would stand after `vllm serve`.
    """
    try:
        parsed = OmniServeCommand().parse(arguments)
        model = parsed.args.model
        config = resolve_command(parsed)[0].config
        place_cores(config)
        devices = stage_devices(config)
    except (StageConfigError, UsageError) as error:
        return None, [Finding("FAIL", "configuration", str(error))]
    names = ", ".join(f"{stage.name} ({stage.kind})" for stage in config.stage_args)
    findings = [Finding("OK", "configuration", f"stages {names}")]
    return config, findings + list(_check_weights(config, model, devices, platform))


def shared_memory_needed(config: PipelineConfig) -> int:
    """Bytes that may wait for all stages together: each takes so much from its sources before they stop."""
    readers = [stage for stage in config.stage_args if stage.engine_input_source]
    return config.runtime.defaults.high_watermark_bytes * max(1, len(readers))


def _check_weights(
    config: PipelineConfig, model: str, devices: dict[int, list[str]], platform: Platform
) -> Iterator[Finding]:
    """The files of a checkpoint against the memory of all devices that its stages use."""
    folders = {stage.checkpoint(model) for stage in config.stage_args if stage.kind != "function"}
    size = sum(path.stat().st_size for folder in folders for path in _weight_files(Path(folder)))
    if not size:
        yield Finding("OK", "weights", "not on this machine yet; how large they are is not known")
        return
    if platform.device_type == "cpu":
        memory, where = psutil.virtual_memory().available, "this machine's memory that is available"
    else:
        used = {int(name) for names in devices.values() for name in names if name.isdigit()}
        memory = sum(size for place, (_, size) in enumerate(platform.devices) if place in used) or 1 << 62
        where = f"the memory of {len(used)} device(s)"
    message = f"{size / _GIB:.1f} GiB of files; {memory / _GIB:.1f} GiB is {where}"
    if size <= memory:
        yield Finding("OK", "weights", message)
        return
    # Not sure to fail: they may be quantized, or converted to fewer bits, while they are loaded.
    remedy = (
        "use more devices (runtime.devices, --tensor-parallel-size), fewer bits (--dtype, --quantization), --offload"
    )
    yield Finding("WARN", "weights", message, remedy)


def _weight_files(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in folder.rglob(pattern)] if folder.is_dir() else []
