# SPDX-License-Identifier: Apache-2.0
"""Quantization while loading, as diffusers' `PipelineQuantizationConfig` describes it, from the words of a YAML file.

Which packages and devices a method needs, its quantizers in diffusers and transformers say.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from diffusers import ModelMixin, PipelineQuantizationConfig
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as DIFFUSERS_METHODS
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as TRANSFORMERS_METHODS
from transformers.quantizers.auto import AutoHfQuantizer

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.errors import StageConfigError

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
