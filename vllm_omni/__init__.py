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
    from vllm_omni.config.stage import StageKind
    from vllm_omni.config.stage_config import WindowConfig
    from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
    from vllm_omni.entrypoints.omni_llm import OmniLLM
    from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, ImageProgressEvent
    from vllm_omni.function_stage import FunctionStage
    from vllm_omni.inputs import StageInput, StageRequest
    from vllm_omni.model_executor.prompt_processor import PromptProcessor
    from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
    from vllm_omni.outputs import OmniRequestOutput, StageOutput
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
    "FunctionStage",
    "ImageProgressEvent",
    "Omni",
    "OmniLLM",
    "OmniRequestOutput",
    "OmniStageConfig",
    "PromptProcessor",
    "StageInput",
    "StageInputProcessor",
    "StageKind",
    "StageOutput",
    "StageRequest",
    "WindowConfig",
    "__version__",
    "set_stage_gpu_devices",
]

_NAMES = {
    "config": ("OmniStageConfig",),
    "config.stage": ("StageKind",),
    "config.stage_config": ("WindowConfig",),
    "entrypoints.async_omni_llm": ("AsyncOmniLLM",),
    "entrypoints.omni_llm": ("OmniLLM",),
    "events": ("ARSegmentEvent", "CompletedEvent", "ErrorEvent", "ImageProgressEvent"),
    "function_stage": ("FunctionStage",),
    "inputs": ("StageInput", "StageRequest"),
    "model_executor.prompt_processor": ("PromptProcessor",),
    "model_executor.stage_input_processor": ("StageInputProcessor",),
    "outputs": ("OmniRequestOutput", "StageOutput"),
    "placement.devices": ("set_stage_gpu_devices",),
    "sampling_params": ("DiffusionSamplingParams",),
}
"""By the module in this package."""
_ALIASES = {"AsyncOmni": "AsyncOmniLLM", "Omni": "OmniLLM"}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562).

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
    """
    attribute = _ALIASES.get(name, name)
    if attribute not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_omni.metrics.status_line import importing_vllm
    from vllm_omni.vllm_requirement import require_vllm

    require_vllm()
    with importing_vllm():
        value = getattr(import_module(f"{__name__}.{_MODULES[attribute]}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
