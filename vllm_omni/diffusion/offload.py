# SPDX-License-Identifier: Apache-2.0
"""Moves the weights of a diffusers pipeline to the stage's device, or keeps them on the CPU until they are needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from diffusers import DiffusionPipeline, ModelMixin

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.errors import StageConfigError


def check_offload(config: DiTConfig, device: torch.device) -> None:
    """Raises StageConfigError without an accelerator."""
    if config.offload is not None and device.type == "cpu":
        raise StageConfigError(
            f"engine_args.offload: {config.offload}: keeps weights on the CPU, and this stage runs on a CPU; remove it"
        )


def place_modules(
    pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], config: DiTConfig, device: torch.device
) -> None:
    """Moves a pipeline's modules to the device, or makes them move when they are called.

    Args:
        modules: Those with weights, by name.

    Raises:
        StageConfigError: The device's memory is too small.
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
    """Moves a component to the device when it is called, and all others to the CPU.

    Diffusers' `enable_model_cpu_offload` expects components in one order, and removes and adds its hooks after every
    call of the pipeline: neither works for concurrent calls.

    Attributes:
        execution_device: Of the pipeline; diffusers reads it from the hooks of the components.
    """

    def __init__(self, device: torch.device, components: Sequence[torch.nn.Module]) -> None:
        self.execution_device = device
        self._components = components
        self._is_on_device = False

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self._is_on_device:
            for other in self._components:
                other._hf_hook.move_to_cpu(other)  # type: ignore[union-attr, operator]
            module.to(self.execution_device)
            self._is_on_device = True
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)

    def move_to_cpu(self, module: torch.nn.Module) -> None:
        if self._is_on_device:
            module.to("cpu")
            self._is_on_device = False


def _offload_components(pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    components = [module for name, module in modules.items() if name not in pipe._exclude_from_cpu_offload]
    for module in modules.values():
        if module in components:
            add_hook_to_module(module, OneAtATime(device, components))
        else:
            module.to(device)


def _offload_groups(modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    from diffusers.hooks import apply_group_offloading

    # As diffusers' enable_group_offload, which would include what a stage's part leaves out. Each layer is a group:
    # this works for every module, and with a CUDA stream the next layer is copied while one computes.
    how: dict[str, Any] = {"offload_type": "leaf_level", "use_stream": device.type == "cuda"}
    for name, module in modules.items():
        if not isinstance(module, ModelMixin):
            apply_group_offloading(module, onload_device=device, **how)
        elif module._supports_group_offloading:
            module.enable_group_offload(onload_device=device, **how)
        else:
            raise StageConfigError(
                f"engine_args.offload: group: {name} ({type(module).__name__}) cannot do it; set model or sequential"
            )


def _offload_layers(pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    from accelerate import cpu_offload

    for name, module in modules.items():
        if name in pipe._exclude_from_cpu_offload:
            module.to(device)
        else:
            cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)
