# SPDX-License-Identifier: Apache-2.0
"""Loads a diffusers pipeline with a stage's configuration, or reports why it cannot be loaded.

Where possible, what the platform or the checkpoint lacks is refused before any weights are read: diffusers and
transformers find most of it too, some of it after minutes of loading, and not always by name. Diffusers loads, and
decides which modules keep float32. Knows no pipeline by name.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel, DiffusionPipeline, ModelMixin
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from vllm_omni.checkpoint_weights import INDEX, read_head, read_index
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.modular_info import ModularPipelineInfo, read_pipeline_info
from vllm_omni.diffusion.offload import check_offload, place_modules
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.diffusion.pipeline_settings import (
    apply_settings,
    check_settings,
    find_denoisers,
    loaded_modules,
    quantization_config,
)
from vllm_omni.errors import StageConfigError

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, AttributeError, SafetensorError)


def load_pipeline(model: str, config: DiTConfig, device: torch.device) -> DiffusionPipeline:
    """A pipeline that is ready to be called: on its device, all settings applied, in eval mode, without progress bars.

    Components that a stage's `part` excludes have no weights: they are on the meta device, and raise when called.

    Args:
        model: A folder, or a name on the hub.

    Raises:
        StageConfigError: The checkpoint is incomplete, damaged or of a kind that is not allowed, or a setting is
            unknown, or not supported by the pipeline or this device.
    """
    info, classes, left_out = _read_components(model, config)
    check_offload(config, device)
    check_settings(config, info.pipeline_class, classes, device, resolve_dtype(config, device))
    with _no_progress_bars():
        pipe = _load(model, info, classes, left_out, config, device)
    modules = loaded_modules(pipe)
    loaded = {name: module for name, module in modules.items() if name not in left_out}
    _check_complete(model, loaded)
    pipe.set_progress_bar_config(disable=True)
    for module in modules.values():
        module.eval()
    apply_settings(pipe, config)
    place_modules(pipe, loaded, config, device)
    return pipe


def denoiser_names(model: str, config: DiTConfig) -> list[str]:
    """The components of a stage that run at every step.

    Raises:
        StageConfigError: It has none, or the checkpoint cannot be used.
    """
    _, classes, left_out = _read_components(model, config)
    names = [name for name in find_denoisers(classes) if name not in left_out]
    if not names:
        raise StageConfigError(f"{model}: this stage runs no denoiser that several devices could share")
    return names


def load_denoisers(model: str, config: DiTConfig, device: torch.device) -> dict[str, torch.nn.Module]:
    """The stage's denoisers alone, by component, as `load_pipeline` loads them. Raises as `load_pipeline`."""
    names = denoiser_names(model, config)
    pipe = load_pipeline(model, dataclasses.replace(config, part=names), device)
    return {name: pipe.components[name] for name in names}


def weight_bytes(model: str, config: DiTConfig, device: torch.device) -> int:
    """Bytes of the weights that `load_pipeline` loads onto this kind of device. Reads configurations only.

    Modules that a model keeps in float32 are counted in the pipeline's dtype.

    Raises:
        StageConfigError: They cannot be counted without loading them.
    """
    if config.quantization or config.offload:
        raise StageConfigError("weights that are quantized or offloaded while they are loaded cannot be estimated")
    info, classes, left_out = _read_components(model, config)
    modules = {n: c for n, c in classes.items() if issubclass(c, torch.nn.Module) and n not in left_out}
    places = _places(model, info, modules)
    empty = [_without_weights(*places[name], cls, config, device) for name, cls in modules.items() if name in places]
    return sum(tensor.nbytes for module in empty for tensor in module.state_dict().values())


def resolve_dtype(config: DiTConfig, device: torch.device) -> torch.dtype:
    """The dtype of the weights, except those that a model keeps in another one."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.dtype)


def _read_components(model: str, config: DiTConfig) -> tuple[PipelineInfo, dict[str, type], dict[str, type]]:
    """The checkpoint, the class of each component, and the models that the stage's part excludes.

    Raises:
        StageConfigError: It cannot be read, or one of its classes is unknown.
    """
    info = read_pipeline_info(model, config)
    classes = _component_classes(model, info, config)
    return info, classes, _left_out(info.pipeline_class, classes, config)


def _component_classes(model: str, info: PipelineInfo, config: DiTConfig) -> dict[str, type]:
    """The class of each component that the pipeline takes and the checkpoint has.

    With `trust_remote_code` diffusers looks for unknown classes in the checkpoint.

    Raises:
        StageConfigError: One is missing, or its class is unknown.
    """
    if isinstance(info, ModularPipelineInfo):
        return info.component_classes
    expected, _ = info.pipeline_class._get_signature_keys(info.pipeline_class)
    classes = {}
    for name in sorted(expected):
        match info.index.get(name):
            case [str(library), str(class_name)]:
                pass
            case None | [None, None] if name in info.pipeline_class._optional_components:
                continue
            case entry:
                raise StageConfigError(
                    f"{model}: {info.pipeline_class.__name__} needs a {name}; model_index.json has {entry!r} instead "
                    "of its library and class"
                )
        try:
            classes[name] = simple_get_class_obj(library, class_name)
        except (ImportError, AttributeError, ValueError) as error:
            if not config.trust_remote_code:
                raise StageConfigError(
                    f"{model}: {name} is a {class_name}, which {library} does not have here; install a version that "
                    "does, or, if the class comes with the checkpoint and you have read it, set "
                    "engine_args.trust_remote_code: true"
                ) from error
    return classes


def _places(model: str, info: PipelineInfo, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The checkpoint and the folder in it of each component that is loaded."""
    if isinstance(info, ModularPipelineInfo):
        return {name: (str(s.pretrained_model_name_or_path), s.subfolder or "") for name, s in info.specs.items()}
    return {name: (model, name) for name in names}


def _left_out(pipeline_class: type, classes: Mapping[str, type], config: DiTConfig) -> dict[str, type]:
    """The models that a stage's part excludes. Tokenizers and schedulers are always loaded.

    Raises:
        StageConfigError: Nothing would be left, or they can only be built with their weights.
    """
    if config.part == "pipeline":
        return {}
    modules = {name: cls for name, cls in classes.items() if issubclass(cls, torch.nn.Module)}
    where = f"engine_args.part: {config.part}: {pipeline_class.__name__}"
    loaded = _components_of(config.part, pipeline_class, modules, where)
    left_out = {name: cls for name, cls in modules.items() if name not in loaded}
    for name, cls in left_out.items():
        if not issubclass(cls, (ModelMixin, PreTrainedModel)):
            raise StageConfigError(f"{where}: {name} ({cls.__name__}) cannot be left out; set part: pipeline")
    return left_out


def _components_of(part: str | list[str], pipeline_class: type, modules: Mapping[str, type], where: str) -> set[str]:
    """The models of a part."""
    if isinstance(part, list):
        for name in part:
            if name not in modules:
                raise StageConfigError(f"{where} has no model {name!r}{nearest(name, modules)} ({', '.join(modules)})")
        return set(part)
    encoders = {name for name in modules if "text_encoder" in name}
    if not encoders or encoders == set(modules) or not hasattr(pipeline_class, "encode_prompt"):
        raise StageConfigError(f"{where} does not encode prompts in a separate method; set part: pipeline")
    return encoders if part == "encoder" else set(modules) - encoders


def _without_weights(model: str, name: str, cls: type, config: DiTConfig, device: torch.device) -> torch.nn.Module:
    """A component built from its configuration, on the meta device."""
    empty, dtype = _empty_class(name, cls, config.part, device), resolve_dtype(config, device)
    place = {"subfolder": name, "revision": config.revision}
    try:
        if issubclass(cls, ModelMixin):
            settings = empty.load_config(model, **place)
            with torch.device("meta"):
                return torch.nn.Module.to(empty.from_config(settings), dtype)
        settings = empty.config_class.from_pretrained(model, **place)
        with torch.device("meta"):
            return torch.nn.Module.to(empty(settings), dtype)
    except _LOADING_ERRORS as error:
        raise StageConfigError(
            f"{model}: {name} ({cls.__name__}) cannot be built without its weights: {error}; set part: pipeline"
        ) from error


def _empty_class(name: str, cls: type, part: str | list[str], device: torch.device) -> Any:
    """The class of a component without weights. It raises when called. Its device is the pipeline's, because diffusers
    takes the device of the first component."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is not loaded: this stage has part: {part}, and the pipeline called {name}")

    body: dict[str, Any] = {method: refuse for method in ("forward", "encode", "decode") if hasattr(cls, method)}
    body |= {"__module__": cls.__module__, "device": property(lambda self: device)}
    return type(cls.__name__, (cls,), body)


def _load(
    model: str,
    info: PipelineInfo,
    classes: Mapping[str, type],
    left_out: Mapping[str, type],
    config: DiTConfig,
    device: torch.device,
) -> DiffusionPipeline:
    quantization = quantization_config(config, classes)
    places = _places(model, info, left_out)
    empty = {name: _without_weights(*places[name], cls, config, device) for name, cls in left_out.items()}
    if isinstance(info, ModularPipelineInfo):
        return _load_modular(model, info, empty, config, device, quantization)
    folder = _local_folder(model, info.pipeline_class, left_out, config)
    check_weight_files(folder, [name for name in classes if name not in left_out], classes, config)
    try:
        pipe = info.pipeline_class.from_pretrained(
            str(folder),
            dtype=resolve_dtype(config, device),
            quantization_config=quantization,
            **_file_choice(config),
            **empty,
        )
    except _LOADING_ERRORS as error:
        raise StageConfigError(f"{model}: cannot be loaded as {info.pipeline_class.__name__}: {error}") from error
    return pipe


def _load_modular(
    model: str,
    info: ModularPipelineInfo,
    empty: Mapping[str, Any],
    config: DiTConfig,
    device: torch.device,
    quantization: Any,
) -> Any:
    """Loads each component once, for all workflows. diffusers' `load_components` would go on without one that fails."""
    loaded = dict(empty)
    for name, spec in info.specs.items():
        if name in empty:
            continue
        place = Path(str(spec.pretrained_model_name_or_path), spec.subfolder or "")
        cls = spec.type_hint
        arguments: dict[str, Any] = {}
        if cls in (None, AutoModel) or cls.__module__.startswith("transformers.models.auto"):  # May be code of its own.
            is_own = str(spec.pretrained_model_name_or_path) == model
            arguments["trust_remote_code"] = config.trust_remote_code and is_own
        if cls is None or issubclass(cls, torch.nn.Module):
            if place.is_dir():
                _check_weights(place, config)
            arguments |= {"dtype": resolve_dtype(config, device), "use_safetensors": config.use_safetensors or None}
            arguments |= {} if config.variant is None else {"variant": config.variant}
            is_diffusers = cls is None or issubclass(cls, ModelMixin)
            method = quantization and quantization._resolve_quant_config(is_diffusers=is_diffusers, module_name=name)
            arguments |= {"quantization_config": method} if method else {}
        try:
            loaded[name] = spec.load(**arguments)
        except _LOADING_ERRORS as error:
            raise StageConfigError(f"{model}: {name} cannot be loaded from {place}: {error}") from error
    pipe: Any = info.pipe
    pipe.register_components(**loaded)
    pipe.__class__ = info.pipeline_class
    return pipe


def _file_choice(config: DiTConfig) -> dict[str, Any]:
    # use_safetensors=False means pickled weights only.
    return {
        "variant": config.variant,
        "use_safetensors": config.use_safetensors or None,
        "trust_remote_code": config.trust_remote_code,
    }


def _local_folder(model: str, pipeline_class: Any, left_out: Mapping[str, type], config: DiTConfig) -> Path:
    """The checkpoint's folder; a name on the hub is downloaded, without what is left out."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(
            pipeline_class.download(model, revision=config.revision, **_file_choice(config), **dict.fromkeys(left_out))
        )
    except _LOADING_ERRORS as error:
        raise StageConfigError(f"{model}: cannot be downloaded: {error}") from error


def _check_complete(model: str, modules: Mapping[str, torch.nn.Module]) -> None:
    for name, module in modules.items():
        missing = [key for key, value in module.state_dict().items() if value.is_meta]
        if missing:
            raise StageConfigError(
                f"{model}: {name} has no weights for {', '.join(missing[:3])} ({len(missing)} in all); its files "
                "are incomplete or of another model: download the checkpoint again"
            )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading prints nothing on the caller's terminal."""
    libraries = [diffusers_logging, transformers_logging]
    enabled = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in enabled:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in enabled:
            library.enable_progress_bar()


_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weight_files(folder: Path, names: Iterable[str], classes: Mapping[str, type], config: DiTConfig) -> None:
    """Checks names and headers of the weights, nothing else.

    Args:
        folder: The checkpoint.
        names: The components to load.
        classes: The class of each component.

    Raises:
        StageConfigError: A file is missing, not allowed or damaged; names it, and what to do.
    """
    for name in names:
        place = folder / name
        if not place.is_dir():
            if (folder / "config.json").is_file():  # a component in the checkpoint's own folder
                continue
            raise StageConfigError(f"{place}: is missing; model_index.json names it: download the checkpoint again")
        if issubclass(classes[name], torch.nn.Module):
            _check_weights(place, config)


def _check_weights(place: Path, config: DiTConfig) -> None:
    files = sorted(place.glob("*.safetensors"))
    pickled = sorted(file for pattern in _PICKLED for file in place.glob(pattern))
    if not files and not pickled:
        raise StageConfigError(f"{place}: has no weights; download the checkpoint again")
    if not files and config.use_safetensors:
        raise StageConfigError(
            f"{place}: its weights are pickled ({pickled[0].name}), and a pickle can run any code when it is read; use "
            "a checkpoint with safetensors, or, if you trust this one, set engine_args.use_safetensors: false"
        )
    try:
        for file in files:
            read_head(file)
        indices = {index: sorted(read_index(index)) for index in sorted(place.glob(f"*{INDEX}"))}
    except ValueError as error:
        raise StageConfigError(f"{error}; download it again") from error
    for index, shards in indices.items():
        for shard in shards:
            if not shard.is_file():
                raise StageConfigError(f"{shard}: is missing; {index.name} names it: download it again")
