# SPDX-License-Identifier: Apache-2.0
"""Settings that make a diffusers pipeline faster or smaller: quantization, VAE, attention, caches, compilation.

`check_settings` refuses what is unsupported before any weights are read, with a small trial where no other check
exists; `apply_settings` applies the rest to the loaded pipeline. The choices come from diffusers.

A cache is one of diffusers' caching methods for denoisers, by name: `first_block_cache` is `FirstBlockCacheConfig`, and
so on. It holds results of an image's earlier steps. The runner completes an image before it starts the next one, calls
`follow` for each, and clears the cache of an aborted one (`maybe_free_model_hooks`, which diffusers calls itself for a
complete image).
"""

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
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
from vllm_omni.diffusion.cache_state import TIMESTEP, Timestep
from vllm_omni.diffusion.context_parallel import check_context_parallel
from vllm_omni.diffusion.modular import ModularCall
from vllm_omni.errors import StageConfigError

_DENOISER_PACKAGES = ("diffusers.models.transformers.", "diffusers.models.unets.")
_DENOISER_NAMES = ("transformer", "unet")


def check_settings(
    config: DiTConfig, pipeline_class: type, classes: Mapping[str, type], device: torch.device, dtype: torch.dtype
) -> None:
    """Refuses what the pipeline, this device or this installation cannot do.

    Args:
        classes: The class of each of the pipeline's components, where known.
        dtype: Of the weights.

    Raises:
        StageConfigError: Names the setting, the reason, and the supported values.
    """
    _check_vae(config, classes)
    denoisers = {name: classes[name] for name in find_denoisers(classes)}
    check_context_parallel(config, denoisers, device)
    if config.cache_backend is not None:
        check_cache(config, pipeline_class, denoisers)
    if config.attention_backend is not None:
        _check_attention(config.attention_backend, device, dtype)
    if config.compile:
        _check_compiler(device)


def apply_settings(pipe: DiffusionPipeline, config: DiTConfig) -> None:
    """Applies the settings to a loaded pipeline, wherever its weights are."""
    modules = loaded_modules(pipe)
    denoisers = [modules[name] for name in find_denoisers({name: type(item) for name, item in modules.items()})]
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


def loaded_modules(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The networks among a pipeline's components, by name."""
    return {name: item for name, item in pipe.components.items() if isinstance(item, torch.nn.Module)}


def find_denoisers(classes: Mapping[str, type]) -> list[str]:
    """The components that run at every step: diffusers' transformers and UNets, by package or name."""
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
            raise StageConfigError(f"engine_args.{key}: this pipeline has no VAE that supports it; remove it")


def _apply_to_vae(vae: AutoencoderMixin, config: DiTConfig) -> None:
    for key, enable in (("vae_slicing", vae.enable_slicing), ("vae_tiling", vae.enable_tiling)):
        try:
            if getattr(config, key):
                enable()
        except NotImplementedError as error:
            raise StageConfigError(f"engine_args.{key}: {error} Remove it.") from error


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
    except Exception as error:  # any error of a kernel or its package
        raise StageConfigError(
            f"engine_args.attention_backend: {name}: does not work with {dtype} on {device}: {error}; install its "
            "package, or use native"
        ) from error


def _set_attention(denoiser: torch.nn.Module, name: str) -> None:
    if not isinstance(denoiser, ModelMixin):
        raise StageConfigError(
            f"engine_args.attention_backend: {type(denoiser).__name__} is not a model of diffusers'; remove it"
        )
    # It also becomes the backend of the process, which other stages may share: only inside of this.
    with attention_backend(name):
        denoiser.set_attention_backend(name)


# Compilation.


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
    except Exception as error:  # any error of the compilers that torch calls
        reason = str(error).partition("\n")[0]
        raise StageConfigError(
            f"engine_args.compile: torch.compile fails: {reason}; it needs a C++ compiler, and Triton on a GPU"
        ) from error


def _compile(denoiser: torch.nn.Module) -> None:
    """Compiles the repeated blocks of a model that declares them: quicker than the whole, nearly as fast to run."""
    if isinstance(denoiser, ModelMixin) and denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks()
    else:
        # Not `Module.compile`, which would bypass the `forward` that the runner replaces.
        denoiser.forward = torch.compile(denoiser.forward)


def cache_backends() -> dict[str, Any]:
    """The values of `cache_backend`, and the class of each one's settings."""
    names = [name for name in vars(diffusers.hooks) if name.endswith("CacheConfig")]
    classes = [getattr(diffusers.hooks, name) for name in (*names, "PyramidAttentionBroadcastConfig")]
    return {cls.__module__.rpartition(".")[2]: cls for cls in classes}


def check_cache(config: DiTConfig, pipeline_class: type, denoisers: Mapping[str, type]) -> None:
    """
    Args:
        denoisers: The class of each component that is to be cached, by name.

    Raises:
        StageConfigError: This pipeline cannot be cached so; names the method, setting or component, and the choices.
    """
    settings = _settings(config)
    if issubclass(pipeline_class, ModularCall) and not pipeline_class.names_passes:
        raise StageConfigError(
            f"engine_args.cache_backend: the blocks of {pipeline_class.__name__} do not name the guided passes of a "
            "step, which a cache has to keep apart (diffusers' cache_context); remove it"
        )
    for name, cls in denoisers.items():
        if not issubclass(cls, CacheMixin):
            raise StageConfigError(
                f"engine_args.cache_backend: diffusers has no caching for {name} ({cls.__name__}); remove it"
            )
    if hasattr(settings, TIMESTEP) and not hasattr(pipeline_class, "current_timestep"):
        raise StageConfigError(
            f"engine_args.cache_backend: {config.cache_backend} reads the timesteps of the pipeline, and "
            f"{pipeline_class.__name__} does not provide them; use another one of {', '.join(cache_backends())}"
        )


def enable_cache(denoiser: torch.nn.Module, config: DiTConfig) -> None:
    """
    Raises:
        StageConfigError: The cache does not support this model.
    """
    assert isinstance(denoiser, CacheMixin)
    settings = _settings(config)
    if hasattr(settings, TIMESTEP):
        settings = dataclasses.replace(settings, **{TIMESTEP: Timestep()})
    try:
        denoiser.enable_cache(settings)
    except (ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise StageConfigError(
            f"engine_args.cache_backend: {config.cache_backend} does not fit {type(denoiser).__name__}: {error}"
        ) from error


def _settings(config: DiTConfig) -> Any:
    """The settings as an object of diffusers.

    Raises:
        StageConfigError: The method or setting is unknown, or the value is invalid.
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
    """A value of a YAML file as diffusers' type."""
    if isinstance(default, torch.dtype) and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    return value


_WHERE = "engine_args.quantization"


def quantization_config(config: DiTConfig, classes: Mapping[str, type]) -> PipelineQuantizationConfig | None:
    """The argument of `from_pretrained`, as diffusers' `PipelineQuantizationConfig` describes it; None for none.

    The values of `quant_mapping`, which are objects in diffusers, are mappings here: `quant_backend`, and that method's
    own arguments. The quantizers of diffusers and transformers check the packages and devices that a method needs.

    Args:
        classes: The class of each component, where known.

    Raises:
        StageConfigError: An argument, a method or a component is unknown, or the method is not supported here.
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
    """The quantization of one component, as an object of its library."""
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
    """One of torchao's classes, e.g. `Int8WeightOnlyConfig`, with its defaults."""
    torchao = importlib.import_module("torchao.quantization")
    known = [other for other in dir(torchao) if other.endswith("Config")]
    if name not in known:
        raise StageConfigError(f"{_WHERE}: torchao has no {name!r}{nearest(name, known)}")
    return getattr(torchao, name)()


def _check_environment(config: PipelineQuantizationConfig, name: str, is_diffusers: bool) -> None:
    """Raises the errors of the method's quantizer."""
    method = config._resolve_quant_config(is_diffusers=is_diffusers, module_name=name)
    if method is not None:
        quantizers = DiffusersAutoQuantizer if is_diffusers else AutoHfQuantizer
        quantizers.from_config(method, pre_quantized=False).validate_environment(device_map=None)
