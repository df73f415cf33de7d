# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a diffusers pipeline lie: on the stage's device, or on the CPU while they are not needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from diffusers import DiffusionPipeline, ModelMixin

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.errors import StageConfigError


def check_offload(config: DiTConfig, device: torch.device) -> None:
    """Raises StageConfigError where there is nothing that weights could be kept off."""
    if config.offload is not None and device.type == "cpu":
        raise StageConfigError(
            f"engine_args.offload: {config.offload}: keeps weights off an accelerator, and this stage computes on a "
            "CPU; remove it"
        )


def place(
    pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], config: DiTConfig, device: torch.device
) -> None:
    """Brings a pipeline's modules to the device, or sees to it that they come when they are called.

    Args:
        modules: Those that have weights, by name.

    Raises:
        StageConfigError: They do not fit.
    """
    try:
        match config.offload:
            case None:
                for module in modules.values():
                    module.to(device)
            case "model":
                _offload_components(pipe, modules, device)
            case "group":
                _offload_groups(modules, device)
            case "sequential":
                _offload_layers(pipe, modules, device)
    except torch.OutOfMemoryError as error:
        raise StageConfigError(
            f"the pipeline does not fit on {device}: {error}; set engine_args.offload or engine_args.quantization, or "
            "a smaller engine_args.dtype"
        ) from error


class OneAtATime(ModelHook):
    """Brings a component to the device when it is called, and takes all others off it.

    Diffusers' `enable_model_cpu_offload` expects components in one order, and takes its hooks off and on again after
    every call of the pipeline: neither goes with calls that run side by side.

    Attributes:
        execution_device: Where the pipeline computes; diffusers asks the hooks of its components for that.
    """

    def __init__(self, device: torch.device, components: Sequence[torch.nn.Module]) -> None:
        self.execution_device = device
        self._components = components
        self._is_here = False

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self._is_here:
            for other in self._components:
                other._hf_hook.leave(other)  # type: ignore[union-attr, operator]
            module.to(self.execution_device)
            self._is_here = True
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)

    def leave(self, module: torch.nn.Module) -> None:
        if self._is_here:
            module.to("cpu")
            self._is_here = False


def _offload_components(pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    components = [module for name, module in modules.items() if name not in pipe._exclude_from_cpu_offload]
    for module in modules.values():
        if module in components:
            add_hook_to_module(module, OneAtATime(device, components))
        else:
            module.to(device)


def _offload_groups(modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    from diffusers.hooks import apply_group_offloading

    # As diffusers' enable_group_offload does, which would take along what a stage's part leaves out. Each layer is a
    # group: it works for every module, and with a stream the next one is on its way while one computes.
    how: dict[str, Any] = {"offload_type": "leaf_level", "use_stream": device.type == "cuda"}
    for name, module in modules.items():
        if not isinstance(module, ModelMixin):
            apply_group_offloading(module, onload_device=device, **how)
        elif module._supports_group_offloading:
            module.enable_group_offload(onload_device=device, **how)
        else:
            raise StageConfigError(
                f"engine_args.offload: group: {name} ({type(module).__name__}) cannot do that; use model or sequential"
            )


def _offload_layers(pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    from accelerate import cpu_offload

    for name, module in modules.items():
        if name in pipe._exclude_from_cpu_offload:
            module.to(device)
        else:
            cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)
