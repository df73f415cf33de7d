# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported versions of vLLM: names that have moved, classes where the behaviour changed, and
what has passed on a GPU.

Each version has a folder with the same modules and names. Here all of them are those of the installed version, imported
at first use: nothing else of ours depends on a version. `docs/upgrading_vllm.md` tells how one is added.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.vllm_versions.v0_32.gpu import PASSED_ON_GPU
    from vllm_omni.vllm_versions.v0_32.messages import MessagesHandler
    from vllm_omni.vllm_versions.v0_32.names import MM_PARSER_MAP, UNSUPPORTED_FLAGS, VLLM_SUBCMD_PARSER_EPILOG
    from vllm_omni.vllm_versions.v0_32.workers import CPULoRARunner

__all__ = [
    "MM_PARSER_MAP",
    "PASSED_ON_GPU",
    "UNSUPPORTED_FLAGS",
    "VLLM_SUBCMD_PARSER_EPILOG",
    "CPULoRARunner",
    "MessagesHandler",
]

_MODULES = {
    "MM_PARSER_MAP": "names",
    "PASSED_ON_GPU": "gpu",
    "UNSUPPORTED_FLAGS": "names",
    "VLLM_SUBCMD_PARSER_EPILOG": "names",
    "CPULoRARunner": "workers",
    "MessagesHandler": "messages",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{folder()}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def folder() -> str:
    """The folder of the installed version, as `v0_32`."""
    from vllm.version import __version_tuple__

    major, minor, *_ = __version_tuple__
    return f"v{major}_{minor}"
