# SPDX-License-Identifier: Apache-2.0
"""Diffusers' context parallelism: several devices compute one call of a denoiser, each some of its tokens.

Diffusers splits what the model's plan (`_cp_plan`) names, exchanges attention's queries, keys and values, and gathers
the output: every process passes the same arguments and gets the same output. Knows no model by name.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import diffusers
import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.models._modeling_parallel import ParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.errors import StageConfigError


def check_context_parallel(config: DiTConfig, denoisers: Mapping[str, type], device: torch.device) -> None:
    """
    Args:
        denoisers: The class of each one, by component.

    Raises:
        StageConfigError: Diffusers cannot do it with this model, attention or device; names what it can.
    """
    if config.context_parallel_size == 1:
        return
    key = "ring_degree" if config.ring_degree > 1 else "ulysses_degree"
    for name, cls in denoisers.items():
        if getattr(cls, "_cp_plan", None) is None:
            raise StageConfigError(
                f"engine_args.{key}: diffusers has no context parallelism for {name} ({cls.__name__}), only for "
                f"{', '.join(_classes_with_plan())}; use data_parallel_size"
            )
    if config.ring_degree > 1 and device.type == "cpu":
        raise StageConfigError(
            "engine_args.ring_degree: no attention backend of diffusers on a CPU has it; use ulysses_degree"
        )
    if config.ring_degree > 1 and config.attention_backend in (None, "native"):
        raise StageConfigError(
            "engine_args.ring_degree: diffusers' native attention does not return the softmax's normalizer, which ring "
            "attention needs; set attention_backend (_native_cudnn, flash, ...), or use ulysses_degree"
        )


def _classes_with_plan() -> list[str]:
    names = (name for name in dir(diffusers) if "Transformer" in name and name.endswith("Model"))
    return [name for name in names if getattr(getattr(diffusers, name), "_cp_plan", None) is not None]


def enable_context_parallel(denoiser: torch.nn.Module, config: DiTConfig, device: torch.device) -> None:
    """Makes the processes of torch.distributed's group compute calls of this denoiser together.

    Consecutive ranks compute one call: the first `context_parallel_size` ones, the next ones, and so on. All ranks call
    this for the same denoisers in the same order.

    Raises:
        StageConfigError: The attention backend does not support it, or the model has too few heads.
    """
    assert isinstance(denoiser, ModelMixin)
    heads, degree = getattr(denoiser.config, "num_attention_heads", None), config.ulysses_degree
    if heads is not None and -heads % degree >= -(-heads // degree):
        raise StageConfigError(
            f"engine_args.ulysses_degree: {degree} devices cannot share {heads} attention heads: the last one would "
            "have none; use a divisor"
        )
    shape = (config.data_parallel_size, config.ring_degree, config.ulysses_degree)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))
    # For sequences of any length: which sizes and prompts a request may have does not depend on the devices.
    context = ContextParallelConfig(
        ring_degree=config.ring_degree,
        ulysses_degree=config.ulysses_degree,
        ring_anything=config.ring_degree > 1,
        ulysses_anything=config.ulysses_degree > 1,
        mesh=mesh,
    )
    if device.type == "cpu":
        denoiser._resolve_parallel_config = MethodType(_resolve_on_cpu, denoiser)
    try:
        denoiser.enable_parallelism(config=context)
    except ValueError as error:
        raise StageConfigError(f"engine_args.attention_backend: {error}") from error


def _resolve_on_cpu(denoiser: Any, context: ContextParallelConfig) -> ParallelConfig:
    """Instead of the method of diffusers, which divides by the number of accelerators."""
    config = ParallelConfig(context_parallel_config=context)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config.setup(rank, world_size, torch.device("cpu"), mesh=context.mesh)
    denoiser._parallel_config = config
    return config
