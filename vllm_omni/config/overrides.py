# SPDX-License-Identifier: Apache-2.0
"""A caller's values for a single stage, which replace those of the stage configuration.

An override has the form of the stage: `{"engine_args": {...}, "runtime": {...}, "default_sampling_params": {...}}`,
`function` of a function stage, and `engine_type: AR` of one that a vLLM engine replaces. Any other key is an engine
argument; engine arguments are checked later.
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
    if ENGINE_TYPE in override:
        stage = with_engine_type(stage, override)
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
    """The stage with the `engine_type` of an override, or the one that follows from its checkpoint. Of a function that
    another engine replaces, only the stage's name is kept, not its settings.

    Raises:
        StageConfigError: It is none that the stage can have, or contradicts other keys.
    """
    has_model = "model" in _sections(override, f"override for {stage.label}")["engine_args"]
    kind = override.get(ENGINE_TYPE, has_model and FUNCTION not in override and stage.kind.model_kind)
    kind = kind or stage.kind.name
    if kind == stage.kind.name:
        return stage
    where = f"override for {stage.label}"
    if kind not in (stage.kind.replaceable_by, stage.kind.model_kind):
        raise StageConfigError(
            f"{where}: {ENGINE_TYPE}: {stage.kind.name} cannot be {kind!r}; a function that accepts audio, without "
            "sources, can be AR"
        )
    if FUNCTION in override:
        raise StageConfigError(f"{where}: {ENGINE_TYPE} {kind} has no {FUNCTION}; give one of them")
    if not has_model:
        does = "transcribes" if kind == stage.kind.replaceable_by else "speaks"
        raise StageConfigError(f"{where}: {ENGINE_TYPE} {kind} needs a checkpoint that {does}: set engine_args.model")
    return msgspec.structs.replace(
        stage,
        engine_type=kind,
        stage_type=None,
        engine_args={"model_stage": stage.name},
        function=None,
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
