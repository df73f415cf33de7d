# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a diffusers checkpoint are there, may be read, and are whole: known from names and headers.

Diffusers and transformers find most of this out too, some of it after minutes of loading, and not always by name.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.errors import StageConfigError

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weight_files(folder: Path, names: Iterable[str], classes: Mapping[str, type], config: DiTConfig) -> None:
    """Reads the headers of the weights, nothing else.

    Args:
        folder: The checkpoint.
        names: The components that are about to be loaded.
        classes: The class of each component.

    Raises:
        StageConfigError: Names the folder or file, and what to do.
    """
    for name in names:
        place = folder / name
        if not place.is_dir():
            if (folder / "config.json").is_file():  # a component that lies in the checkpoint's own folder
                continue
            raise StageConfigError(
                f"{place}: is missing, model_index.json names it; the checkpoint is incomplete: fetch it again"
            )
        if issubclass(classes[name], torch.nn.Module):
            _check_weights(place, config)


def _check_weights(place: Path, config: DiTConfig) -> None:
    files = sorted(place.glob("*.safetensors"))
    pickled = sorted(file for pattern in _PICKLED for file in place.glob(pattern))
    if not files and not pickled:
        raise StageConfigError(f"{place}: holds no weights; the checkpoint is incomplete: fetch it again")
    if not files and config.use_safetensors:
        raise StageConfigError(
            f"{place}: its weights are pickled ({pickled[0].name}), and a pickle can run any code when it is read; use "
            "a checkpoint with safetensors, or, if you trust this one, set engine_args.use_safetensors: false"
        )
    for file in files:
        _check_header(file)
    for index in sorted(place.glob("*.safetensors.index.json")):
        _check_shards(index)


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise StageConfigError(f"{file}: is damaged ({error}); fetch it again") from error


def _check_shards(index: Path) -> None:
    try:
        contents: Any = json.loads(index.read_text(encoding="utf-8"))
        shards = sorted(set(contents["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageConfigError(f"{index}: is damaged; fetch it again") from error
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise StageConfigError(f"{index.parent / shard}: is missing, {index.name} names it; fetch it again")
