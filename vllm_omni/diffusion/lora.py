# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a diffusion pipeline: loaded on first use, and one of them active at a time.

Their weights are not fused with the model's, so that without an adapter the model's results do not change. A file is
checked before the model is changed: diffusers itself would skip weights that do not match, and lets some files
overwrite weights of the model. Nothing here knows requests or batches.
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, LoraBaseMixin
from vllm.lora.utils import get_adapter_absolute_path

FACTOR = re.compile(r"(?P<component>\w+)\.(?P<layer>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
"""A key of diffusers' format: `transformer.blocks.0.attn.to_q.lora_A.weight`."""

OTHER_SIDE = {"A": "B", "B": "A"}


class AdapterManager:
    """The adapters of one loaded pipeline.

    An adapter is identified by its path; its name is for errors. So two adapters can have one name, and one adapter
    under two names is loaded once.
    """

    def __init__(self, pipe: DiffusionPipeline, max_loras: int) -> None:
        """`max_loras`: how many adapters stay loaded; the least recently used one is removed. 0: the denoiser runs on
        several devices, and none are allowed."""
        self._pipe: Any = pipe
        self._max_loras = max_loras
        self._loaded: dict[str, str] = {}  # path -> the adapter's name in the pipeline; the last one was used last
        self._numbers = itertools.count()
        self._active: tuple[str, float] | None = None

    def activate(self, name: str | None, path: str | None, scale: float) -> None:
        """Makes the pipeline's modules compute with one adapter, or with none. Does nothing if they do already.

        Args:
            name: The user's name of the adapter; None: no adapter.
            path: Its safetensors file, or the file's folder, or its name on the hub, from where it is downloaded unless
                it is cached.
            scale: 1: as it was trained.

        Raises:
            ValueError: It is no adapter for this pipeline. The active adapter does not change.
        """
        wanted = None if name is None or path is None else (path, scale)
        if wanted == self._active:
            return
        if name is not None and path is not None and path not in self._loaded:
            self._load(name, path)
        self._apply(wanted)
        self._active = wanted
        while len(self._loaded) > self._max_loras:
            self._pipe.delete_adapters([self._loaded.pop(next(iter(self._loaded)))])

    def _apply(self, wanted: tuple[str, float] | None) -> None:
        if wanted is None:
            self._pipe.disable_lora()
            return
        path, scale = wanted
        adapter = self._loaded[path] = self._loaded.pop(path)  # now the last
        self._pipe.set_adapters([adapter], [scale])
        self._pipe.enable_lora()

    def check(self, name: str, path: str) -> str:
        """An adapter's local path; it is downloaded unless it is cached.

        Raises:
            ValueError: Its file shows that it is no adapter for this pipeline.
        """
        if self._max_loras < 1:
            raise ValueError(f"LoRA adapter {name!r}: this stage takes none: its denoiser runs on several devices")
        place = _place(path)
        problem = _problem(self._pipe, place)
        if problem is not None:
            raise ValueError(f"LoRA adapter {name!r} ({path}): {problem}")
        return place

    def _load(self, name: str, path: str) -> None:
        place = self.check(name, path)
        adapter = f"adapter_{next(self._numbers)}"
        try:
            self._pipe.load_lora_weights(place, adapter_name=adapter, use_safetensors=True, local_files_only=True)
        except Exception as error:  # any error of diffusers or PEFT is the file's fault
            self._pipe.delete_adapters([adapter])
            self._apply(self._active)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"LoRA adapter {name!r} ({path}): cannot be loaded: {error}") from error
        self._loaded[path] = adapter


def _place(path: str) -> str:
    """An adapter's local path; `path` itself if it is not available."""
    try:
        return get_adapter_absolute_path(path)
    except OSError:  # the hub cannot be reached, and the adapter is not cached
        return path


def _problem(pipe: Any, path: str) -> str | None:
    """Why a file is no adapter for this pipeline; None if its file shows no reason."""
    if not isinstance(pipe, LoraBaseMixin):
        return f"{type(pipe).__name__} takes no LoRA adapters"
    if not os.path.exists(path):
        return "no such file or folder, and it could not be downloaded from the hub"
    if os.path.isdir(path):
        files = [file.name for file in Path(path).glob("*.safetensors")]
        if LORA_WEIGHT_NAME_SAFE not in files and len(files) != 1:
            return f"the folder holds {len(files)} .safetensors files: give the path of one of them"
    try:
        weights = _read(pipe, path)
    except Exception as error:  # diffusers reads a dozen formats, with different errors
        return f"is no safetensors file of a LoRA adapter: {error}"
    return _mismatch(pipe, weights)


def _read(pipe: Any, path: str) -> dict[str, torch.Tensor]:
    """The file's tensors, by diffusers' names."""
    extra = {"unet_config": pipe.unet.config} if hasattr(pipe, "unet") else {}
    result = pipe.lora_state_dict(path, use_safetensors=True, local_files_only=True, **extra)
    return result[0] if isinstance(result, tuple) else result  # pipelines with a UNet add network alphas


def _mismatch(pipe: Any, weights: dict[str, torch.Tensor]) -> str | None:
    """Errors that diffusers ignores: it skips weights without a layer, and initializes missing ones."""
    foreign = [key for key in weights if "lora" not in key]
    if foreign:
        return f"has weights that are no LoRA, such as {foreign[0]}: it would change the model for every request"
    components = [name for name in pipe._lora_loadable_modules if getattr(pipe, name, None) is not None]
    if not any(key.startswith(f"{name}.") for key in weights for name in components):
        return f"has no weights for {' or '.join(components) or 'anything that this stage runs'}"
    return _odd_pair(weights) or _misfits(pipe, components, weights)


def _odd_pair(weights: dict[str, torch.Tensor]) -> str | None:
    """A `[rank, inputs]` and B `[outputs, rank]` come together."""
    for key, weight in weights.items():
        match = FACTOR.fullmatch(key)
        if match is None:
            continue
        other = f"{key[: match.start('side')]}{OTHER_SIDE[match['side']]}{key[match.end('side') :]}"
        if other not in weights:
            return f"has half of a pair: {key} without {other}"
        if weight.dim() < 2:
            return f"{key} is not a matrix"
        if match["side"] == "A" and weight.shape[:1] != weights[other].shape[1:2]:
            return f"{key} and {other} are of different ranks"
    return None


def _misfits(pipe: Any, components: list[str], weights: dict[str, torch.Tensor]) -> str | None:
    """The first weight that does not match a layer of the denoiser.

    Names in text encoders differ between versions of transformers; diffusers converts them when it loads.
    """
    models = {name: getattr(pipe, name) for name in components}
    layers = {name: dict(model.named_modules()) for name, model in models.items() if isinstance(model, ModelMixin)}
    for key, weight in weights.items():
        match = FACTOR.fullmatch(key)
        if match and match["component"] in layers:
            problem = _misfit(layers[match["component"]].get(match["layer"]), match["side"], weight)
            if problem is not None:
                return f"{key} is made for another model: {problem}"
    return None


def _misfit(layer: torch.nn.Module | None, side: str, weight: torch.Tensor) -> str | None:
    """Why a layer cannot take one of an adapter's two factors."""
    if layer is None:
        return "no such layer"
    layer = getattr(layer, "base_layer", layer)  # a loaded adapter wraps it
    if not isinstance(layer, torch.nn.Linear):
        return None
    expected, given = (layer.in_features, weight.shape[1]) if side == "A" else (layer.out_features, weight.shape[0])
    return None if expected == given else f"it is for {given} features, the layer has {expected}"
