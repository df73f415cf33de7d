# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a diffusion pipeline: loaded when a request first asks for one, and one of them active at a time.

All weights stay apart from the model's own (nothing is fused), so that without an adapter the model computes what it
always did. A file is checked before the model is touched: diffusers itself would skip what does not fit, and lets some
files overwrite weights of the model. Nothing here knows requests or batches.
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

    An adapter is its path; its name is only what errors call it. So two adapters of one name are two, and one adapter
    under two names is loaded once.
    """

    def __init__(self, pipe: DiffusionPipeline, max_loras: int) -> None:
        """`max_loras`: how many adapters stay loaded; the one that was unused for longest goes first. 0: none are
        taken."""
        self._pipe: Any = pipe
        self._max_loras = max_loras
        self._loaded: dict[str, str] = {}  # path -> the adapter's name in the pipeline; the last is the latest used
        self._numbers = itertools.count()
        self._active: tuple[str, float] | None = None

    def activate(self, name: str | None, path: str | None, scale: float) -> None:
        """Makes the pipeline's modules compute with one adapter, or with none. Costs nothing if they do already.

        Args:
            name: What the user calls the adapter; None: no adapter.
            path: Its file, safetensors, or the folder that the file is in, or its name on the hub, from where it is
                downloaded now unless it was before.
            scale: How strongly it counts; 1: as it was trained.

        Raises:
            ValueError: It is no adapter for this pipeline. What was active still is.
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
        adapter = self._loaded[path] = self._loaded.pop(path)  # now the latest
        self._pipe.set_adapters([adapter], [scale])
        self._pipe.enable_lora()

    def check(self, name: str, path: str) -> str:
        """Where an adapter lies on this machine, which is downloaded now unless it was before.

        Raises:
            ValueError: It is no adapter for this pipeline, as far as its file shows it.
        """
        if self._max_loras < 1:
            raise ValueError(f"LoRA adapter {name!r}: this stage takes none (max_loras is {self._max_loras})")
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
        except Exception as error:  # whatever the file provokes in diffusers or PEFT is the file's fault
            self._pipe.delete_adapters([adapter])
            self._apply(self._active)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"LoRA adapter {name!r} ({path}): cannot be loaded: {error}") from error
        self._loaded[path] = adapter


def _place(path: str) -> str:
    """Where an adapter lies on this machine; `path` itself, if nowhere."""
    try:
        return get_adapter_absolute_path(path)
    except OSError:  # the hub cannot be reached, and nothing was kept
        return path


def _problem(pipe: Any, path: str) -> str | None:
    """What keeps a file from being an adapter for this pipeline; None: nothing that can be seen from outside."""
    if not isinstance(pipe, LoraBaseMixin):
        return f"{type(pipe).__name__} takes no LoRA adapters"
    if not os.path.exists(path):
        return "there is no such file or folder, and it could not be had from the hub"
    if os.path.isdir(path):
        files = [file.name for file in Path(path).glob("*.safetensors")]
        if LORA_WEIGHT_NAME_SAFE not in files and len(files) != 1:
            return f"the folder holds {len(files)} .safetensors files: name the one that is meant"
    try:
        weights = _read(pipe, path)
    except Exception as error:  # diffusers reads a dozen formats, and each fails in a way of its own
        return f"is no safetensors file of a LoRA adapter: {error}"
    return _mismatch(pipe, weights)


def _read(pipe: Any, path: str) -> dict[str, torch.Tensor]:
    """The file's tensors, under the names that diffusers has for them."""
    extra = {"unet_config": pipe.unet.config} if hasattr(pipe, "unet") else {}
    result = pipe.lora_state_dict(path, use_safetensors=True, local_files_only=True, **extra)
    return result[0] if isinstance(result, tuple) else result  # pipelines with a UNet add network alphas


def _mismatch(pipe: Any, weights: dict[str, torch.Tensor]) -> str | None:
    """What diffusers would overlook: it skips what it finds no place for, and makes up what is missing."""
    foreign = [key for key in weights if "lora" not in key]
    if foreign:
        return f"holds what is no LoRA, such as {foreign[0]}: it would change the model for every request"
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
            return f"has one half of a pair: {key} without {other}"
        if weight.dim() < 2:
            return f"{key} is no matrix"
        if match["side"] == "A" and weight.shape[:1] != weights[other].shape[1:2]:
            return f"{key} and {other} are of different ranks"
    return None


def _misfits(pipe: Any, components: list[str], weights: dict[str, torch.Tensor]) -> str | None:
    """The first weight that has no place in the denoiser.

    Names in text encoders differ between versions of transformers; diffusers translates them as it loads.
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
        return "there is no such layer"
    layer = getattr(layer, "base_layer", layer)  # an adapter that is loaded already wraps it
    if not isinstance(layer, torch.nn.Linear):
        return None
    expected, given = (layer.in_features, weight.shape[1]) if side == "A" else (layer.out_features, weight.shape[0])
    return None if expected == given else f"it is for {given} features, the layer has {expected}"
