# SPDX-License-Identifier: Apache-2.0
"""The engine arguments of a vLLM stage: which there are, whether they are right, and what they come to."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import transformers
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_hf_text_config
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import nearest
from vllm_omni.engine.engine_args import INT8, EngineType, OmniEngineSettings, create_engine_args, message_of
from vllm_omni.engine.hf_override import StageConfigOverride, load_hf_config
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import find_models

VLLM_ARGUMENTS = {field.name for field in dataclasses.fields(EngineArgs)}
OWN_ARGUMENTS = {
    name
    for name, parameter in inspect.signature(create_engine_args).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
LENGTH = "max_model_len"
# Fields of `EngineArgs` that are not arguments of a stage, or that we set internally.
_NOT_SHOWN = {"model", "hf_overrides", "additional_config"}


def make_engine_args(stage: OmniStageConfig, model: str, engine_type: EngineType) -> EngineArgs:
    """The engine arguments of a vLLM stage of a pipeline for `model`. Raises as `create_engine_args`."""
    return create_engine_args(stage.checkpoint(model), engine_type=engine_type, **stage.vllm_engine_args)


def check_engine_args(stage: OmniStageConfig, model: str, engine_type: EngineType) -> EngineArgs:
    """The engine arguments of a vLLM stage of a pipeline for `model`, whose errors name the stage.

    Raises:
        StageConfigError: An argument is wrong.
    """
    try:
        engine_args = make_engine_args(stage, model, engine_type)
    except (ValueError, TypeError) as error:
        raise StageConfigError(f"{stage.label}: engine_args: {message_of(error)}") from error
    architecture = stage.engine_args.get("model_arch")
    known = ModelRegistry.get_supported_archs()
    if architecture is not None and architecture not in known and not hasattr(transformers, architecture):
        raise StageConfigError(
            f"{stage.label}: engine_args.model_arch: neither vLLM nor a package has an architecture {architecture!r}"
            f"{nearest(architecture, known)}\n{find_models().describe()}"
        )
    return engine_args


def longest_length(stage: OmniStageConfig, model: str, engine_type: EngineType) -> int | None:
    """The length of a vLLM stage's checkpoint, if its `max_model_len` is longer; None if vLLM accepts that, or refuses
    something else, which is reported when the arguments are checked."""
    given = stage.engine_args[LENGTH]
    arguments = {name: value for name, value in stage.vllm_engine_args.items() if name != LENGTH}
    try:
        engine_args = create_engine_args(stage.checkpoint(model), engine_type=engine_type, **arguments)
        if given <= _declared_length(engine_args, arguments):
            return None
        model_config = engine_args.create_model_config()  # May take seconds.
    except (ValueError, TypeError, AssertionError, OSError):
        return None
    try:
        model_config.get_and_verify_max_len(given)
    except ValueError:
        return model_config.max_model_len
    return None


def _declared_length(engine_args: EngineArgs, arguments: Mapping[str, Any]) -> float:
    """The length in the configuration of a stage's model, before any scaling; infinite if there is none."""
    hf_config = cast(StageConfigOverride, engine_args.hf_overrides)(load_hf_config(engine_args.model, arguments))
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(hf_config.model_type, ModelArchConfigConvertorBase)
    return convertor(hf_config, get_hf_text_config(hf_config)).derive_max_model_len_and_key()[0]


def computed_arguments(stage: OmniStageConfig, model: str, engine_type: EngineType) -> Iterator[tuple[str, Any, str]]:
    """The plain arguments that differ from vLLM's defaults, each with its source, and the type of int8 weights."""
    args = make_engine_args(stage, model, engine_type)
    source = f"computed: {stage.kind.name} stage on {current_platform.device_name}"
    for field in dataclasses.fields(EngineArgs):
        value = vars(args)[field.name]
        is_plain = isinstance(value, (str, int, float, bool))
        if field.name not in _NOT_SHOWN and is_plain and value != field.default:
            of_runtime = field.name == "max_num_seqs"
            yield field.name, value, "computed: runtime.max_batch_size" if of_runtime else source
    if OmniEngineSettings.from_vllm_config(args).int8_weights:
        yield "weights", INT8, "computed: quantization"
