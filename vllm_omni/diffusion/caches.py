# SPDX-License-Identifier: Apache-2.0
"""Diffusers' caching methods for denoisers, by name: `first_block_cache` is `FirstBlockCacheConfig`, and so on.

A cache holds what one picture computed at earlier steps. Whoever runs the pipeline sees to it that a picture is
complete before the next one begins, that its caches `follow` that picture, and that what is left of an aborted one is
dropped (`maybe_free_model_hooks`, which diffusers calls itself when a picture is complete).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import diffusers.hooks
import torch
from diffusers import DiffusionPipeline
from diffusers.models.cache_utils import CacheMixin

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.errors import StageConfigError

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
