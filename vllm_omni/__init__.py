# SPDX-License-Identifier: Apache-2.0
"""vllm_omni: any-to-any models as a pipeline of stages, each a real vLLM engine in its own process.

Importing this package imports neither torch nor vLLM, patches nothing and touches no device: the names below are
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_omni.version import __version__

if TYPE_CHECKING:
    from vllm_omni.config import OmniStageConfig
    from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
    from vllm_omni.entrypoints.omni_llm import OmniLLM
    from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, ImageProgressEvent
    from vllm_omni.outputs import OmniRequestOutput
    from vllm_omni.placement.devices import set_stage_gpu_devices
    from vllm_omni.sampling_params import DiffusionSamplingParams

    Omni = OmniLLM
    AsyncOmni = AsyncOmniLLM

__all__ = [
    "ARSegmentEvent",
    "AsyncOmni",
    "AsyncOmniLLM",
    "CompletedEvent",
    "DiffusionSamplingParams",
    "ErrorEvent",
    "ImageProgressEvent",
    "Omni",
    "OmniLLM",
    "OmniRequestOutput",
    "OmniStageConfig",
    "__version__",
    "set_stage_gpu_devices",
]

_MODULES = {
    "ARSegmentEvent": ("vllm_omni.events", "ARSegmentEvent"),
    "AsyncOmni": ("vllm_omni.entrypoints.async_omni_llm", "AsyncOmniLLM"),
    "AsyncOmniLLM": ("vllm_omni.entrypoints.async_omni_llm", "AsyncOmniLLM"),
    "CompletedEvent": ("vllm_omni.events", "CompletedEvent"),
    "DiffusionSamplingParams": ("vllm_omni.sampling_params", "DiffusionSamplingParams"),
    "ErrorEvent": ("vllm_omni.events", "ErrorEvent"),
    "ImageProgressEvent": ("vllm_omni.events", "ImageProgressEvent"),
    "Omni": ("vllm_omni.entrypoints.omni_llm", "OmniLLM"),
    "OmniLLM": ("vllm_omni.entrypoints.omni_llm", "OmniLLM"),
    "OmniRequestOutput": ("vllm_omni.outputs", "OmniRequestOutput"),
    "OmniStageConfig": ("vllm_omni.config", "OmniStageConfig"),
    "set_stage_gpu_devices": ("vllm_omni.placement.devices", "set_stage_gpu_devices"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562).

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_omni.metrics.status_line import importing_vllm
    from vllm_omni.vllm_requirement import require_vllm

    require_vllm()
    module, attribute = _MODULES[name]
    with importing_vllm():
        value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
