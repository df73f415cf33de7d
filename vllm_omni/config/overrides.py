# SPDX-License-Identifier: Apache-2.0
"""A caller's values for a single stage, which replace those of the stage configuration.

An override has the form of the stage: `{"engine_args": {...}, "runtime": {...}, "default_sampling_params": {...}}`,
`function` of a function stage or of one that transcribes, which it replaces, and `engine_type: AR` of one that a vLLM
engine replaces. Any other key is an engine argument; engine arguments are checked later.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.config.utils import convert_config, given_value, nearest, split_error
from vllm_omni.errors import StageConfigError

SECTIONS = ("engine_args", "runtime", "default_sampling_params")
FUNCTION, ENGINE_TYPE = "function", "engine_type"
STAGE_KEYS = (FUNCTION, ENGINE_TYPE)
"""Keys of a stage itself."""

# Engine arguments that have the meaning of a key of `runtime`, and would win over it.
_SAME_AS_RUNTIME = {
    "memory": ("gpu_memory_utilization", "kv_cache_memory_bytes"),
    "max_batch_size": ("max_num_seqs", "max_batch_size"),
}


def override_stage(stage: OmniStageConfig, override: Mapping[str, Any]) -> OmniStageConfig:
    """The stage with an override's values; a dict below a section is replaced as a whole.

    Raises:
        StageConfigError: A section is not a mapping, `runtime` has an unknown key or a value of the wrong type, or
            `function` cannot be imported, or `engine_type` is none that the stage can have.
    """
    where = f"override for {stage.label}"
    stage = with_engine_type(stage, override)
    if ENGINE_TYPE in override:
        override = {key: value for key, value in override.items() if key != ENGINE_TYPE}
    if FUNCTION in override and stage.kind.has_function:
        path = str(override[FUNCTION])
        resolve_dotted_path(path, f"{where}: {FUNCTION}")
        stage = msgspec.structs.replace(stage, function=path, batch_function=None)
        override = {key: value for key, value in override.items() if key != FUNCTION}
    sections = _sections(override, where)
    runtime = sections["runtime"]
    replaced = {same for key in runtime for same in _SAME_AS_RUNTIME.get(key, ())}
    kept = {name: value for name, value in stage.engine_args.items() if name not in replaced}
    return msgspec.structs.replace(
        stage,
        engine_args=kept | sections["engine_args"],
        runtime=_override_runtime(stage.runtime, runtime, where) if runtime else stage.runtime,
        default_sampling_params=stage.default_sampling_params | sections["default_sampling_params"],
    )


def with_engine_type(stage: OmniStageConfig, override: Mapping[str, Any]) -> OmniStageConfig:
    """The stage with the `engine_type` of an override, or the one that follows from its checkpoint or function. Of a
    stage that is replaced so, only the name is kept, not its settings.

    Raises:
        StageConfigError: It is none that the stage can have, or contradicts other keys.
    """
    where = f"override for {stage.label}"
    kind, given, has_function = stage.kind, override.get(ENGINE_TYPE), FUNCTION in override
    checkpoint = _sections(override, where)["engine_args"].get("model")
    model_kind = kind.kind_with(str(checkpoint or ""))
    others = (kind.replaceable_by, model_kind)
    if has_function and any(others) and given not in (None, "function"):
        raise StageConfigError(f"{where}: {ENGINE_TYPE} {given} has no {FUNCTION}; give one of them")
    name = given or kind.name
    if given is None and has_function and kind.replaceable_by == "function":
        name = "function"
    elif given is None and checkpoint is not None and not has_function and model_kind:
        name = model_kind
    if name == kind.name:
        return stage
    if name not in others:
        raise StageConfigError(
            f"{where}: {ENGINE_TYPE}: {kind.name} cannot be {name!r}; a function that accepts audio, without "
            "sources, can be AR"
        )
    if name == "function":
        if not has_function:
            raise StageConfigError(f"{where}: {ENGINE_TYPE} {name} needs a {FUNCTION}")
        return _bare(stage, name, str(override[FUNCTION]), StageRuntimeConfig())
    if checkpoint is None:
        does = "transcribes" if name == kind.replaceable_by else "speaks"
        raise StageConfigError(f"{where}: {ENGINE_TYPE} {name} needs a checkpoint that {does}: set engine_args.model")
    return _bare(stage, name, None, stage.runtime)


def _bare(stage: OmniStageConfig, kind: str, function: str | None, runtime: StageRuntimeConfig) -> OmniStageConfig:
    """The stage as another kind, with the settings that every kind has."""
    return msgspec.structs.replace(
        stage,
        engine_type=kind,
        stage_type=None,
        runtime=runtime,
        engine_args={"model_stage": stage.name},
        function=function,
        batch_function=None,
        default_sampling_params={},
    )


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """A deep merge of two mappings; values of the second win."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def overridden_keys(override: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The (section, key) pairs in an override."""
    return {(section, key) for section, values in _sections(override, "override").items() for key in values}


def _sections(override: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in override.items():
        if key not in sections:
            sections["engine_args"][key] = value
        elif isinstance(value, Mapping):
            sections[key].update(value)
        else:
            raise StageConfigError(f"{where}: {key} is a section, {value!r} is not a mapping; set one of its keys")
    return sections


def _override_runtime(runtime: StageRuntimeConfig, values: Mapping[str, Any], where: str) -> StageRuntimeConfig:
    try:
        return convert_config(msgspec.to_builtins(runtime) | dict(values), StageRuntimeConfig)
    except msgspec.ValidationError as error:
        problem, key = split_error(error)
        if unknown := re.search(r"unknown field `(.+?)`", problem):
            known = StageRuntimeConfig.__struct_fields__
            near = nearest(unknown.group(1), known)
            problem = f"there is no runtime.{unknown.group(1)}{near} (known here: {', '.join(known)})"
        given = given_value(error, values)
        raise StageConfigError(f"{where}: {f'runtime.{key}: ' if key else ''}{problem}{given}") from error
