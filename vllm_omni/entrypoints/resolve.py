# SPDX-License-Identifier: Apache-2.0
"""Which stages a checkpoint runs as, and with which arguments. Starts nothing, loads no weights, touches no device."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.config.dit_config import DiTConfig, parse_dit_config
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import find_stage_configs, stage_configs_dir
from vllm_omni.diffusion.pipeline_info import PipelineInfo, is_diffusers_model
from vllm_omni.engine.hf_override import load_hf_config
from vllm_omni.entrypoints.stage_arguments import apply_arguments, resolve_checkpoints
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.budgets import apply_budgets


@dataclass(frozen=True)
class ReadPipeline:
    """A pipeline's configuration for any machine, and how it came to be.

    Attributes:
        source: The file that was read; None for a diffusers model, whose only stage needs none.
        loaded: What the file says.
        with_arguments: The same with the caller's arguments.
        with_checkpoints: The same with checkpoints found.
    """

    source: Path | None
    loaded: PipelineConfig
    with_arguments: PipelineConfig
    with_checkpoints: PipelineConfig


@dataclass(frozen=True)
class ResolvedPipeline(ReadPipeline):
    """A pipeline's configuration for this machine.

    Attributes:
        config: The same with budgets turned into engine arguments: what is run.
    """

    config: PipelineConfig


def resolve_pipeline(
    model: str,
    stage_configs_path: str | None,
    *,
    stage_overrides: Mapping[str | int, Mapping[str, Any]],
    runtime_overrides: Mapping[str, Any],
    engine_args: Mapping[str, Any],
) -> ResolvedPipeline:
    """Finds a checkpoint's configuration and applies arguments, which are those of `OmniLLM`.

    Raises:
        StageConfigError: There is no such checkpoint, or the configuration or an argument is wrong, or does not fit
            this machine's devices.
    """
    read = read_pipeline(
        model,
        stage_configs_path,
        stage_overrides=stage_overrides,
        runtime_overrides=runtime_overrides,
        engine_args=engine_args,
    )
    return ResolvedPipeline(**vars(read), config=apply_budgets(read.with_checkpoints))


def read_pipeline(
    model: str,
    stage_configs_path: str | None,
    *,
    stage_overrides: Mapping[str | int, Mapping[str, Any]],
    runtime_overrides: Mapping[str, Any],
    engine_args: Mapping[str, Any],
) -> ReadPipeline:
    """The same, for any machine: this one's devices are not looked at.

    Raises:
        StageConfigError: There is no such checkpoint, or the configuration or an argument is wrong.
    """
    source = _source(model, stage_configs_path, engine_args)
    loaded = _one_diffusion_stage(model, engine_args) if source is None else load_pipeline_config(source)
    said = {key: value for key, value in runtime_overrides.items() if value is not None}
    with_arguments = apply_arguments(loaded.with_runtime(**said), engine_args, stage_overrides)
    return ReadPipeline(source, loaded, with_arguments, resolve_checkpoints(with_arguments, model))


def has_vllm_stages(model: str, stage_configs_path: str | None, engine_args: Mapping[str, Any]) -> bool:
    """Whether any stage of a checkpoint's pipeline is a vLLM engine. Raises as `resolve_pipeline`."""
    source = _source(model, stage_configs_path, engine_args)
    return source is not None and any(stage.runs_vllm for stage in load_pipeline_config(source).stage_args)


def _source(model: str, stage_configs_path: str | None, engine_args: Mapping[str, Any]) -> Path | None:
    return _find_file(model, engine_args) if stage_configs_path is None else find_stage_configs(stage_configs_path)


def _find_file(model: str, engine_args: Mapping[str, Any]) -> Path | None:
    """The stage configuration that ships for a checkpoint; None for a diffusers pipeline."""
    _check_is_checkpoint(model)
    if is_diffusers_model(model, engine_args.get("revision")):
        return None
    try:
        hf_config = load_hf_config(model, engine_args)
    except (OSError, ValueError) as error:
        problem = str(error).strip().split("\n")[0]
        raise StageConfigError(f"{model}: is no checkpoint that can be read: {problem}") from error
    shipped = stage_configs_dir() / f"{hf_config.model_type}.yaml"
    # A model without a pipeline of its own is one that vLLM serves alone.
    return shipped if shipped.exists() else stage_configs_dir() / "text.yaml"


def _check_is_checkpoint(model: str) -> None:
    if not Path(model).exists() and (not model or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise StageConfigError(
            f"{model!r} is no checkpoint: there is no such folder, and it is no name on the Hugging Face hub "
            "(NAME or ORGANIZATION/NAME)"
        )


def _one_diffusion_stage(model: str, engine_args: Mapping[str, Any]) -> PipelineConfig:
    """Any diffusers pipeline as the pipeline's only stage; what it makes is what its class says."""
    known = {name: value for name, value in engine_args.items() if name in DiTConfig.__struct_fields__}
    info = PipelineInfo.load(model, parse_dit_config(known, model))
    stage = OmniStageConfig(
        stage_id=0,
        engine_type="DiT",
        engine_args={"model_stage": "diffusion"},
        final_output=True,
        final_output_type=info.output_type,
    )
    return PipelineConfig(stage_args=[stage])
