# SPDX-License-Identifier: Apache-2.0
"""Which arguments of `OmniLLM` reach which stage, and which checkpoint each stage runs."""

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.overrides import merge, override_stage
from vllm_omni.config.resources import check_resources
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig, find_stage
from vllm_omni.config.utils import nearest
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.errors import StageConfigError

# One half of vLLM's cache would be here and the other in the first stage; they disagree after a refused request.
_FOR_VLLM_STAGES = {"mm_processor_cache_gb": 0}
# Arguments that the pipeline itself reads.
_FOR_ALL = {"otlp_traces_endpoint", "trust_remote_code"}
_OWN_ARGUMENTS = {
    name
    for name, parameter in inspect.signature(create_engine_args).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def apply_arguments(
    config: PipelineConfig, engine_args: Mapping[str, Any], overrides: Mapping[str | int, Mapping[str, Any]]
) -> PipelineConfig:
    """Gives every stage those of `engine_args` that stages of its kind know, and its own of `overrides`.

    Args:
        overrides: By stage name or id; see `config.overrides`.

    Raises:
        StageConfigError: There is an argument that no stage knows, an override for a stage that is not there, or one
            that is wrong.
    """
    known = _FOR_ALL.union(*(_known_arguments(stage) for stage in config.stage_args))
    for name in engine_args:
        if name not in known:
            raise StageConfigError(f"no stage of this pipeline has an engine argument {name!r}{nearest(name, known)}")
    by_stage = _overrides_by_stage(config, overrides)
    placed = [override_stage(s, {"runtime": by_stage[s.stage_id].get("runtime", {})}) for s in config.stage_args]
    check_resources(config.with_stage_args(placed))
    stages = []
    for stage in config.stage_args:
        of_its_kind = _known_arguments(stage)
        if stage.stage_id not in config.adapter_stages:
            of_its_kind.discard("lora_modules")
        shared = {name: value for name, value in engine_args.items() if name in of_its_kind}
        added = (_FOR_VLLM_STAGES if stage.runs_vllm else {}) | shared
        stage = msgspec.structs.replace(stage, engine_args=stage.engine_args | added)
        stages.append(override_stage(stage, by_stage[stage.stage_id]))
    return config.with_stage_args(stages)


def _overrides_by_stage(
    config: PipelineConfig, overrides: Mapping[str | int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    by_stage: dict[int, dict[str, Any]] = {stage_id: {} for stage_id in config.stages}
    for key, values in overrides.items():
        stage_id = find_stage(config, key).stage_id
        if not isinstance(values, Mapping):
            raise StageConfigError(f"override for stage {key}: {values!r} is no mapping of keys to values")
        by_stage[stage_id] = merge(by_stage[stage_id], values)
    return by_stage


def resolve_checkpoints(config: PipelineConfig, model: str) -> PipelineConfig:
    """Makes every stage's own `engine_args.model` one that can be opened from anywhere.

    Raises:
        StageConfigError: It is a path where there is nothing.
    """
    stages = []
    for stage in config.stage_args:
        own = stage.engine_args.get("model")
        if own is not None:
            where = f"stage {stage.stage_id} ({stage.name}): engine_args.model"
            engine_args = stage.engine_args | {"model": _resolve(own, model, where)}
            stage = msgspec.structs.replace(stage, engine_args=engine_args)
        stages.append(stage)
    return config.with_stage_args(stages)


def _known_arguments(stage: OmniStageConfig) -> set[str]:
    if stage.runs_vllm:
        return {field.name for field in dataclasses.fields(EngineArgs)} | _OWN_ARGUMENTS
    return set(DiTConfig.__struct_fields__) if stage.kind == "DiT" else set()


def _resolve(own: Any, model: str, where: str) -> str:
    """A folder in the pipeline's checkpoint, a path, or a name on the hub, in this order."""
    if not isinstance(own, str) or not own:
        raise StageConfigError(f"{where}: {own!r} is no checkpoint; write a path or a name on the hub")
    for path in (Path(model) / own, Path(own).expanduser()):
        if path.exists():
            return str(path.resolve())
    if own.startswith(("/", ".", "~")) or own.count("/") > 1:
        raise StageConfigError(
            f"{where}: there is no {own!r}, neither in {model!r} nor anywhere else; write a path or a name on the hub"
        )
    return own
