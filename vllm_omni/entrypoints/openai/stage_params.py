# SPDX-License-Identifier: Apache-2.0
"""What a request may set of the stages' sampling: `sampling_params_list`, and the settings of a diffusion model."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.diffusion.request_settings import check_values
from vllm_omni.entrypoints.openai.media_output import FILE_FORMATS
from vllm_omni.entrypoints.openai.server_args import RequestLimits, flag
from vllm_omni.sampling_params import DiffusionSamplingParams

# Without those that configure the engine (`extra_args`, `output_kind`, ...).
SAMPLING_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "detokenize", "logit_bias",
        "bad_words", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "structured_outputs",
    }
)  # fmt: skip

_GRAMMARS = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})

_NOT_IN_REQUESTS = ("preview_every", "lora_scale", "return_trajectory")

SETTINGS = tuple(name for name in DiffusionSamplingParams.__struct_fields__ if name not in _NOT_IN_REQUESTS)
"""The settings of a diffusion model that a request may set. Endpoints with previews set `preview_every`."""

_KNOWN = {"sampling": SAMPLING_FIELDS, "diffusion": frozenset({*SETTINGS, "extra_body"})}

ADAPTER_SETTINGS = ("lora", "lora_scale")
"""Further settings where a request may name one of the server's LoRA adapters."""


def read_stage_params(
    given: Sequence[Mapping[str, Any] | None] | None, config: PipelineConfig
) -> list[Mapping[str, Any] | None]:
    """One entry for each stage, in stage order; None for a stage's defaults.

    Raises:
        VLLMValidationError: The number of entries is wrong, or one has an unknown field.
    """
    stages = config.stage_args
    if given is None:
        return [None] * len(stages)
    if len(given) != len(stages):
        names = ", ".join(stage.name for stage in stages)
        raise VLLMValidationError(
            f"sampling_params_list must have one entry for each of the {len(stages)} stages ({names}), null for a "
            "stage's defaults",
            parameter="sampling_params_list",
            value=len(given),
        )
    return [_read_entry(entry, stage, i) for i, (entry, stage) in enumerate(zip(given, stages, strict=True))]


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that are given: null is as good as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def explicit_fields(request: BaseModel) -> frozenset[str]:
    """Names of the sampling parameters that a request sets in its own fields."""
    names = {name for name in request.model_fields_set if getattr(request, name) is not None}
    return frozenset(names | ({"max_tokens"} if "max_completion_tokens" in names else set()))


def _read_entry(entry: Mapping[str, Any] | None, stage: OmniStageConfig, index: int) -> Mapping[str, Any] | None:
    if not entry:
        return None
    known = _KNOWN.get(stage.kind.params or "")
    if known is None:
        if stage.kind.load_parameters() is not None:
            return entry  # `RequestBuilder` checks it.
        raise VLLMValidationError(
            f"stage {stage.name!r} does not sample; give it null", parameter=f"sampling_params_list[{index}]"
        )
    for name in entry:
        if name not in known:
            raise VLLMValidationError(
                f"unknown sampling parameter {name!r} for stage {stage.name!r}{nearest(name, known)}",
                parameter=f"sampling_params_list[{index}].{name}",
            )
    return diffusion_settings(entry) if stage.kind.params == "diffusion" else entry


def check_grammar(params: Any, limits: RequestLimits) -> None:
    """
    Args:
        params: What a request sets of a stage: `SamplingParams`, a dict of its fields, or anything without a grammar.

    Raises:
        ValueError: Its grammar is larger than grammars may be.
    """
    if isinstance(params, Mapping):
        constraint = params.get("structured_outputs")
    else:
        constraint = params.structured_outputs if isinstance(params, SamplingParams) else None
    if constraint is None:
        return
    given = constraint if isinstance(constraint, Mapping) else vars(constraint)
    waiting = [value for name, value in given.items() if name in _GRAMMARS]
    num_bytes, num_values = 0, sum(value.count(",") for value in waiting if isinstance(value, str))  # a schema as text
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += (*value, *value.values())
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, str):
            num_bytes += len(value.encode())
            num_values += value.count("|")
        num_values += 1
        if num_bytes > limits.max_grammar_bytes:
            name, unit = "max_grammar_bytes", "bytes"
        elif num_values > limits.max_grammar_values:
            name, unit = "max_grammar_values", "values"
        else:
            continue
        raise ValueError(
            f"structured_outputs: the grammar, or the schema, has more than {getattr(limits, name)} {unit}, which is "
            f"the limit ({flag(name)})"
        )


def diffusion_settings(request_fields: Mapping[str, Any], *, adapters: bool = False) -> dict[str, Any]:
    """The settings of a request for a diffusion model, as fields of `DiffusionSamplingParams`; without nulls.

    Args:
        request_fields: Settings are in the field `extra_body`, which has nothing else, or at the top level.
        adapters: Also reads `ADAPTER_SETTINGS`, see `DiffusionEndpoint.with_adapter`.

    Raises:
        VLLMValidationError: A setting is unknown, set to two values, or its value is out of range.
    """
    body = request_fields.get("extra_body")
    if body is None:
        body = {}
    if not isinstance(body, Mapping):
        raise VLLMValidationError("extra_body must be an object of settings", parameter="extra_body")
    known = SETTINGS + ADAPTER_SETTINGS if adapters else SETTINGS
    settings = {name: request_fields[name] for name in known if request_fields.get(name) is not None}
    for name, value in body.items():
        if name not in known:
            raise VLLMValidationError(_unknown(name, known), parameter=f"extra_body.{name}")
        if name in settings and value is not None and settings[name] != value:
            raise VLLMValidationError(
                f"{name} has two values, in extra_body and at the top level; keep one", parameter=name
            )
        if value is not None:
            settings[name] = value
    return {name: _checked(name, value) for name, value in settings.items()}


def _checked(name: str, value: Any) -> Any:
    if name == "lora":
        if not isinstance(value, str):
            raise VLLMValidationError("lora must be the name of an adapter", parameter=name)
        return value
    try:
        params = convert({name: value}, DiffusionSamplingParams)
        _check_arguments(params.extra_args)
        check_values(params)
    except msgspec.ValidationError as error:
        raise VLLMValidationError(f"{name}: {split_error(error)[0]}", parameter=name) from error
    except (ValueError, TypeError) as error:
        raise VLLMValidationError(str(error), parameter=name) from error
    if name == "output_format" and value not in FILE_FORMATS:
        raise VLLMValidationError(
            f"output_format {value!r} is not for HTTP; give one of {', '.join(FILE_FORMATS)}", parameter=name
        )
    return getattr(params, name)


_MAX_ARGUMENT_VALUES = 1_000
_MAX_ARGUMENT_DEPTH = 4
_MAX_ARGUMENT_CHARACTERS = 32_000
_LARGEST_ARGUMENT = 10_000
"""A number whose cost nobody knows."""


def _check_arguments(extra_args: Mapping[str, Any]) -> None:
    """What is beyond the limits of their cost, which the stage checks by name: `request_settings.check_limits`."""
    for name, value in extra_args.items():
        values = _flattened(value)
        if any(isinstance(each, Mapping) for each in values):
            raise ValueError(f"extra_args: {name!r} is an object, which a request cannot have")
        if any(isinstance(each, (int, float)) and not abs(each) <= _LARGEST_ARGUMENT for each in values):
            raise ValueError(f"extra_args: {name!r} has a number above {_LARGEST_ARGUMENT}")
        if len(values) > _MAX_ARGUMENT_VALUES:
            raise ValueError(f"extra_args: {name!r} has more than {_MAX_ARGUMENT_VALUES} values")
        if sum(len(each) for each in values if isinstance(each, str)) > _MAX_ARGUMENT_CHARACTERS:
            raise ValueError(f"extra_args: {name!r} has more than {_MAX_ARGUMENT_CHARACTERS} characters")


def _flattened(value: Any, depth: int = 0) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    if depth == _MAX_ARGUMENT_DEPTH:
        raise ValueError(f"extra_args has lists in more than {_MAX_ARGUMENT_DEPTH} lists")
    return [each for item in value for each in _flattened(item, depth + 1)]


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in DiffusionSamplingParams.__struct_fields__:
        return f"{name} cannot be set by a request; the server's operator can, in the stage's default_sampling_params"
    return f"extra_body has no {name!r}{nearest(name, known)} (known: {', '.join(known)})"
