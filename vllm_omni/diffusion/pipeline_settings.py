# SPDX-License-Identifier: Apache-2.0
"""The settings of a diffusers pipeline that make it faster or smaller: VAE, attention, caches, compilation.

`check_settings` says what cannot be had before any weights are read, by trying it in small where nobody says so;
`apply_settings` applies the rest to the loaded pipeline. What there is to choose from, diffusers says.
"""

from collections.abc import Callable, Mapping

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.models.autoencoders.vae import AutoencoderMixin

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.caches import check_cache, enable_cache
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
