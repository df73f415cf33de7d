# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in PEFT's format, and checkpoints with merged adapters."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "o_proj")
WEIGHTS = "model.safetensors"


def write_adapter(checkpoint: Path, folder: Path, seed: int, prefix: str = "model.") -> Path:
    """A strong random adapter for the attention of all layers whose weight names start with `prefix`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(checkpoint / WEIGHTS)
    adapter = {}
    for name in sorted(weights):
        if name.startswith(prefix) and name.removesuffix(".weight").endswith(TARGETS):
            rows, columns = weights[name].shape
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
            adapter[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    assert adapter
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_adapter(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Writes the checkpoint with an adapter merged into its weights."""
    shutil.copytree(checkpoint, folder)
    weights, low_rank = load_file(checkpoint / WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in low_rank if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        delta = low_rank[f"{layer}.lora_B.weight"] @ low_rank[name]
        weights[f"{layer.removeprefix('base_model.model.')}.weight"] += delta * ALPHA / RANK
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
