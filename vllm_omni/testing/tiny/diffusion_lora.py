# SPDX-License-Identifier: Apache-2.0
"""Writes a LoRA adapter with random weights for any diffusers pipeline."""

import re
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from safetensors.torch import save_file
from torch import nn

RANK = 4
_SCALE = 0.5
"""Scale of the adapter's output relative to that of a layer with weights about 1 / sqrt(inputs)."""
ATTENTION = re.compile(r"(to_[qkv]|to_out\.0|[qkv]_proj|out_proj)$")


def write_tiny_diffusion_lora(
    model_path: str | Path, out_path: str | Path, seed: int = 0, components: tuple[str, ...] = ("transformer",)
) -> Path:
    """Writes an adapter for all attention layers of `components` into the folder `out_path`, as diffusers saves one.

    Args:
        model_path: The pipeline's folder, with `model_index.json`.
        seed: Equal seeds give identical files.
        components: Names in the pipeline, e.g. `unet`, `text_encoder`.

    Returns:
        The file.

    Raises:
        ValueError: A component has no attention layers of the usual names.
    """
    pipe = DiffusionPipeline.from_pretrained(model_path)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in components:
        component = pipe.components[name]
        added = _factors(component, generator) if isinstance(component, nn.Module) else {}
        if not added:
            raise ValueError(f"{name} of {model_path} has no attention layers of the usual names")
        tensors |= {f"{name}.{key}": tensor for key, tensor in added.items()}
    path = Path(out_path) / LORA_WEIGHT_NAME_SAFE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def _factors(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A `[RANK, inputs]` and B `[outputs, RANK]` of every attention layer."""
    factors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ATTENTION.search(name):
            a, b = (
                torch.randn(shape, generator=generator)
                for shape in ((RANK, layer.in_features), (layer.out_features, RANK))
            )
            factors[f"{name}.lora_A.weight"] = a / layer.in_features**0.5
            factors[f"{name}.lora_B.weight"] = _SCALE * b / RANK**0.5
    return factors
