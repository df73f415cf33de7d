# SPDX-License-Identifier: Apache-2.0
"""Opens a pipeline for a checkpoint: finds its configuration, applies arguments, starts the stages.

Shared by the offline and the asynchronous face.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import get_config

from vllm_omni.config.dit_config import DiTConfig, parse_dit_config
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.paths import stage_configs_dir
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.diffusion.pipeline_info import PipelineInfo, is_diffusers_model
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.entrypoints.stage_arguments import apply_arguments, resolve_checkpoints
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.observer import make_observer
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.stage.budgets import apply_budgets
from vllm_omni.stage.cores import place_cores
from vllm_omni.stage.fork_server import ForkServer


@dataclass(frozen=True)
class Pipeline:
    """A running pipeline and what builds its requests."""

    config: PipelineConfig
    orchestrator: Orchestrator
    builder: RequestBuilder


def open_pipeline(
    server: ForkServer,
    model: str,
    stage_configs_path: str | None,
    *,
    stage_overrides: Mapping[str | int, Mapping[str, Any]],
    runtime_overrides: Mapping[str, Any],
    init_timeout: float,
    shm_threshold_bytes: int,
    log_stats: bool,
    trace_file: str | None,
    engine_args: dict[str, Any],
) -> Pipeline:
    """Starts a pipeline on a fork server, which it takes over, and waits until it takes requests.

    The other arguments, and errors, are those of `OmniLLM`.
    """
    config = _load_config(model, stage_configs_path, engine_args)
    config = config.with_runtime(**{key: value for key, value in runtime_overrides.items() if value is not None})
    config = resolve_checkpoints(apply_arguments(config, engine_args, stage_overrides), model)
    config = apply_budgets(config)
    placements = place_cores(config)
    server.preload(_modules_to_preload(config, _check_engine_args(config, model), model))
    traces_endpoint = engine_args.get("otlp_traces_endpoint")
    observer = make_observer(config, log_stats=log_stats, trace_file=trace_file, otlp_traces_endpoint=traces_endpoint)
    orchestrator = Orchestrator(
        config,
        model,
        shm_threshold_bytes=shm_threshold_bytes,
        init_timeout=init_timeout,
        server=server,
        placements=placements,
        observer=observer,
        records_stats=log_stats,
        otlp_traces_endpoint=traces_endpoint,
    )
    try:
        # While the stages start: this process needs a tokenizer and a preprocessor of its own.
        builder = RequestBuilder(config, model)
        orchestrator.wait_until_started()
    except BaseException:
        orchestrator.close()
        raise
    return Pipeline(config, orchestrator, builder)


def _load_config(model: str, path: str | None, engine_args: Mapping[str, Any]) -> PipelineConfig:
    if path is not None:
        return load_pipeline_config(path)
    if is_diffusers_model(model, engine_args.get("revision")):
        return _one_diffusion_stage(model, engine_args)
    hf_config = get_config(model, trust_remote_code=engine_args.get("trust_remote_code", False))
    shipped = stage_configs_dir() / f"{hf_config.model_type}.yaml"
    # A model without a pipeline of its own is one that vLLM serves alone.
    return load_pipeline_config(shipped if shipped.exists() else stage_configs_dir() / "text.yaml")


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


def _check_engine_args(config: PipelineConfig, model: str) -> list[EngineArgs]:
    """The engine arguments of all vLLM stages; refuses wrong ones, of any stage, before one is started."""
    checked = []
    for stage in config.stage_args:
        where = f"stage {stage.stage_id} ({stage.name})"
        if stage.kind == "DiT":
            parse_dit_config(stage.dit_engine_args, where)
        if stage.runs_vllm:
            checkpoint = stage.checkpoint(model)
            try:
                checked.append(create_engine_args(checkpoint, engine_type=stage.kind.lower(), **stage.vllm_engine_args))
            except (ValueError, TypeError) as error:
                raise StageConfigError(f"{where}: engine_args: {error}") from error
    return checked


def _modules_to_preload(config: PipelineConfig, engine_args: list[EngineArgs], model: str) -> list[str]:
    """What the stages would import otherwise, each for itself."""
    paths = [stage.custom_process_input_func for stage in config.stage_args]
    paths += [path for args in engine_args for path in (args.worker_cls, args.scheduler_cls) if isinstance(path, str)]
    paths += [OMNI_MODELS.get(stage.engine_args.get("model_arch", "")) for stage in config.stage_args]
    modules = {path.replace(":", ".").rpartition(".")[0] for path in paths if path is not None}
    for stage in config.stage_args:
        if stage.kind == "DiT":
            modules |= {"vllm_omni.stage.engines.diffusion", *_pipeline_module(stage, model)}
    return sorted(modules)


def _pipeline_module(stage: OmniStageConfig, model: str) -> list[str]:
    """The module of a diffusion stage's pipeline; none where it is code that comes with the checkpoint."""
    config = parse_dit_config(stage.dit_engine_args, f"stage {stage.stage_id} ({stage.name})")
    module = PipelineInfo.load(stage.checkpoint(model), config).pipeline_class.__module__
    return [module] if module.startswith("diffusers.") else []
