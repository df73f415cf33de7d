# SPDX-License-Identifier: Apache-2.0
"""The settings of a diffusers pipeline that make it faster or smaller: VAE, attention, caches, compilation.

`check_settings` says what cannot be had before any weights are read, by trying it in small where nobody says so;
`apply_settings` applies the rest to the loaded pipeline. What there is to choose from, diffusers says.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import diffusers.hooks
import torch
from diffusers import DiffusionPipeline, ModelMixin, PipelineQuantizationConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.models.autoencoders.vae import AutoencoderMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as DIFFUSERS_METHODS
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as TRANSFORMERS_METHODS
from transformers.quantizers.auto import AutoHfQuantizer

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.errors import StageConfigError

_DENOISER_PACKAGES = ("diffusers.models.transformers.", "diffusers.models.unets.")
_DENOISER_NAMES = ("transformer", "unet")


def check_settings(
    config: DiTConfig, pipeline_class: type, classes: Mapping[str, type], device: torch.device, dtype: torch.dtype
) -> None:
    """Refuses what the pipeline, this device or this installation cannot do.

    Args:
        classes: The class of each of the pipeline's components, as far as it is known.
        dtype: What the weights will be.

    Raises:
        StageConfigError: Names the setting, the reason, and what there is instead.
    """
    _check_vae(config, classes)
    if config.cache_backend is not None:
        check_cache(config, pipeline_class, {name: classes[name] for name in _denoisers(classes)})
    if config.attention_backend is not None:
        _check_attention(config.attention_backend, device, dtype)
    if config.compile:
        _check_compiler(device)


def apply_settings(pipe: DiffusionPipeline, config: DiTConfig) -> None:
    """Applies the settings to a loaded pipeline, wherever its weights are."""
    modules = {name: item for name, item in pipe.components.items() if isinstance(item, torch.nn.Module)}
    denoisers = [modules[name] for name in _denoisers({name: type(item) for name, item in modules.items()})]
    for vae in modules.values():
        if isinstance(vae, AutoencoderMixin):
            _apply_to_vae(vae, config)
    for denoiser in denoisers:
        if config.attention_backend is not None:
            _set_attention(denoiser, config.attention_backend)
        if config.compile:
            _compile(denoiser)
        if config.cache_backend is not None:
            enable_cache(denoiser, config)


def _denoisers(classes: Mapping[str, type]) -> list[str]:
    """The components that run at every step: diffusers' transformers and UNets, or what is called so."""
    return [
        name
        for name, cls in classes.items()
        if issubclass(cls, torch.nn.Module)
        and (cls.__module__.startswith(_DENOISER_PACKAGES) or name.startswith(_DENOISER_NAMES))
    ]


# VAE.


def _check_vae(config: DiTConfig, classes: Mapping[str, type]) -> None:
    has_vae = any(issubclass(cls, AutoencoderMixin) for cls in classes.values())
    for key in ("vae_slicing", "vae_tiling"):
        if getattr(config, key) and not has_vae:
            raise StageConfigError(f"engine_args.{key}: this pipeline has no VAE of diffusers' that could; remove it")


def _apply_to_vae(vae: AutoencoderMixin, config: DiTConfig) -> None:
    def enable(key: str, switch_on: Callable[[], None]) -> None:
        try:
            switch_on()
        except NotImplementedError as error:
            raise StageConfigError(f"engine_args.{key}: {error} Remove it.") from error

    if config.vae_slicing:
        enable("vae_slicing", vae.enable_slicing)
    if config.vae_tiling:
        enable("vae_tiling", vae.enable_tiling)


# Attention.


def _check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise StageConfigError(
            f"engine_args.attention_backend: diffusers has no {name!r}{nearest(name, known)} (known here: "
            f"{', '.join(known)})"
        )
    query = torch.zeros(1, 16, 2, 64, dtype=dtype, device=device)  # batch, tokens, heads, channels
    try:
        with attention_backend(name), torch.no_grad():
            dispatch_attention_fn(query, query, query)
    except Exception as error:  # anything that a kernel, or the package it is from, complains of
        raise StageConfigError(
            f"engine_args.attention_backend: {name}: does not work here with {dtype} on {device}: {error}; install "
            "what it needs, or use native"
        ) from error


def _set_attention(denoiser: torch.nn.Module, name: str) -> None:
    if not isinstance(denoiser, ModelMixin):
        raise StageConfigError(
            f"engine_args.attention_backend: {type(denoiser).__name__} is not a model of diffusers'; remove it"
        )
    # It also becomes the backend of the process, which other stages may share: not beyond this.
    with attention_backend(name):
        denoiser.set_attention_backend(name)


# Compilation.


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
    except Exception as error:  # whatever the compilers that torch calls complain of
        reason = str(error).partition("\n")[0]
        raise StageConfigError(
            f"engine_args.compile: torch.compile does not work here: {reason}; it needs a C++ compiler, and Triton "
            "on a GPU"
        ) from error


def _compile(denoiser: torch.nn.Module) -> None:
    """Its repeated blocks, where the model says what they are: much quicker than all of it, and nearly as good."""
    if isinstance(denoiser, ModelMixin) and denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks()
    else:
        # What the runner replaces is `forward`: `Module.compile` would go round it.
        denoiser.forward = torch.compile(denoiser.forward)


_TIMESTEP = "current_timestep_callback"


def cache_backends() -> dict[str, Any]:
    """What can be said as `cache_backend`, and the class of its settings."""
    names = [name for name in vars(diffusers.hooks) if name.endswith("CacheConfig")]
    classes = [getattr(diffusers.hooks, name) for name in (*names, "PyramidAttentionBroadcastConfig")]
    return {cls.__module__.rpartition(".")[2]: cls for cls in classes}


def check_cache(config: DiTConfig, pipeline_class: type, denoisers: Mapping[str, type]) -> None:
    """Whether this pipeline can be cached as the configuration says.

    Args:
        denoisers: The class of each component that is to be cached, by name.

    Raises:
        StageConfigError: Names the method, setting or component, and what there is.
    """
    settings = _settings(config)
    for name, cls in denoisers.items():
        if not issubclass(cls, CacheMixin):
            raise StageConfigError(
                f"engine_args.cache_backend: diffusers has no caching for {name} ({cls.__name__}); remove it"
            )
    if hasattr(settings, _TIMESTEP) and not hasattr(pipeline_class, "current_timestep"):
        raise StageConfigError(
            f"engine_args.cache_backend: {config.cache_backend} follows the timesteps of the pipeline, and "
            f"{pipeline_class.__name__} does not tell them; use another one of {', '.join(cache_backends())}"
        )


def enable_cache(denoiser: torch.nn.Module, config: DiTConfig) -> None:
    """Puts the cache into a denoiser.

    Raises:
        StageConfigError: It does not fit this model.
    """
    assert isinstance(denoiser, CacheMixin)
    settings = _settings(config)
    if hasattr(settings, _TIMESTEP):
        settings = dataclasses.replace(settings, **{_TIMESTEP: _Timestep()})
    try:
        denoiser.enable_cache(settings)
    except (ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise StageConfigError(
            f"engine_args.cache_backend: {config.cache_backend} does not fit {type(denoiser).__name__}: {error}"
        ) from error


def follow(pipe: DiffusionPipeline) -> None:
    """From now on, caches that go by the timestep ask this pipeline object: a copy of the one that was loaded."""
    for component in pipe.components.values():
        if isinstance(component, CacheMixin) and component.is_cache_enabled:
            callback = getattr(component._cache_config, _TIMESTEP, None)
            if isinstance(callback, _Timestep):
                callback.pipe = pipe


class _Timestep:
    """Where the picture is that is being made.

    Attributes:
        pipe: What makes it.
    """

    pipe: Any

    def __call__(self) -> Any:
        return self.pipe.current_timestep


def _settings(config: DiTConfig) -> Any:
    """The settings as an object of diffusers.

    Raises:
        StageConfigError: There is no such method or setting, or it cannot have this value.
    """
    assert config.cache_backend is not None
    backends = cache_backends()
    if config.cache_backend not in backends:
        raise StageConfigError(
            f"engine_args.cache_backend: diffusers has no {config.cache_backend!r}"
            f"{nearest(config.cache_backend, backends)} (known here: {', '.join(backends)})"
        )
    cls = backends[config.cache_backend]
    where = f"engine_args.cache_config: {config.cache_backend}"
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.name.startswith("_") and "callback" not in f.name}
    for key in config.cache_config:
        if key not in fields:
            known = ", ".join(fields) or "nothing"
            raise StageConfigError(f"{where} has no {key!r}{nearest(key, fields)} (known here: {known})")
    values = {key: _value(value, fields[key].default) for key, value in config.cache_config.items()}
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise StageConfigError(f"{where}: {str(error).strip()}") from error


def _value(value: Any, default: Any) -> Any:
    """A value of a YAML file as diffusers has it."""
    if isinstance(default, torch.dtype) and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    return value


_WHERE = "engine_args.quantization"


def quantization_config(config: DiTConfig, classes: Mapping[str, type]) -> PipelineQuantizationConfig | None:
    """What `from_pretrained` takes; None where nothing is to be quantized.

    The values of `quant_mapping`, which are objects in diffusers, are mappings here: `quant_backend`, and that method's
    own arguments.

    Args:
        classes: The class of each component, as far as it is known.

    Raises:
        StageConfigError: An argument, a method or a component is not known, or the method cannot be had here.
    """
    if config.quantization is None:
        return None
    arguments = dict(config.quantization)
    try:
        if "quant_mapping" in arguments:
            _check_components(arguments["quant_mapping"], classes)
            methods = {name: _method(name, how, classes) for name, how in arguments["quant_mapping"].items()}
            arguments["quant_mapping"] = methods
        result = PipelineQuantizationConfig(**arguments)
        _check_components(result.components_to_quantize or (), classes)
        for name, cls in classes.items():
            if issubclass(cls, torch.nn.Module):
                _check_environment(result, name, is_diffusers=issubclass(cls, ModelMixin))
    except (ValueError, TypeError, RuntimeError, ImportError, AttributeError, KeyError) as error:
        if isinstance(error, StageConfigError):
            raise
        raise StageConfigError(f"{_WHERE}: {error}") from error
    return result


def _check_components(names: Iterable[str], classes: Mapping[str, type]) -> None:
    modules = [name for name, cls in classes.items() if issubclass(cls, torch.nn.Module)]
    for name in names:
        if name not in modules:
            raise StageConfigError(
                f"{_WHERE}: the pipeline has no model {name!r}{nearest(name, modules)} (known here: "
                f"{', '.join(modules)})"
            )


def _method(name: str, how: Any, classes: Mapping[str, type]) -> Any:
    """The quantization of one component, as an object of the library that the component is from."""
    methods = DIFFUSERS_METHODS if issubclass(classes[name], ModelMixin) else TRANSFORMERS_METHODS
    arguments = dict(how)
    backend = arguments.pop("quant_backend", None)
    if backend not in methods:
        raise StageConfigError(
            f"{_WHERE}.quant_mapping.{name}: quant_backend {backend!r} is none{nearest(str(backend), methods)} (known "
            f"here: {', '.join(methods)})"
        )
    if isinstance(arguments.get("quant_type"), str) and backend == "torchao":
        arguments["quant_type"] = _torchao_type(arguments["quant_type"])
    return methods[backend](**arguments)


def _torchao_type(name: str) -> Any:
    """torchao's methods are classes of its own, e.g. `Int8WeightOnlyConfig`; here with their defaults."""
    torchao = importlib.import_module("torchao.quantization")
    known = [other for other in dir(torchao) if other.endswith("Config")]
    if name not in known:
        raise StageConfigError(f"{_WHERE}: torchao has no {name!r}{nearest(name, known)}")
    return getattr(torchao, name)()


def _check_environment(config: PipelineQuantizationConfig, name: str, is_diffusers: bool) -> None:
    """Raises whatever the method's quantizer complains of."""
    method = config._resolve_quant_config(is_diffusers=is_diffusers, module_name=name)
    if method is not None:
        quantizers = DiffusersAutoQuantizer if is_diffusers else AutoHfQuantizer
        quantizers.from_config(method, pre_quantized=False).validate_environment(device_map=None)
