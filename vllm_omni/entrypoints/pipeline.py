# SPDX-License-Identifier: Apache-2.0
"""Opens a pipeline for a checkpoint: finds its configuration, applies arguments, starts the stages.

Shared by the offline and the asynchronous face.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import get_config

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.paths import stage_configs_dir
from vllm_omni.config.stage_config import PipelineConfig, find_stage
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.observer import make_observer
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.stage.budgets import apply_budgets
from vllm_omni.stage.cores import place_cores
from vllm_omni.stage.fork_server import ForkServer

# One half of vLLM's cache would be here and the other in the first stage; they disagree after a refused request.
_FOR_VLLM_STAGES = {"mm_processor_cache_gb": 0}


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
    config = apply_budgets(_apply_arguments(config, engine_args, stage_overrides))
    placements = place_cores(config)
    server.preload(_modules_to_preload(config, _check_engine_args(config, model)))
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
    hf_config = get_config(model, trust_remote_code=engine_args.get("trust_remote_code", False))
    shipped = stage_configs_dir() / f"{hf_config.model_type}.yaml"
    # A model without a pipeline of its own is one that vLLM serves alone.
    return load_pipeline_config(shipped if shipped.exists() else stage_configs_dir() / "text.yaml")


def _apply_arguments(
    config: PipelineConfig, engine_args: dict[str, Any], overrides: Mapping[str | int, Mapping[str, Any]]
) -> PipelineConfig:
    by_stage: dict[int, dict[str, Any]] = {}
    for key, values in overrides.items():
        by_stage.setdefault(find_stage(config, key).stage_id, {}).update(values)
    stages = []
    for stage in config.stage_args:
        added = {**(_FOR_VLLM_STAGES | engine_args if stage.runs_vllm else {}), **by_stage.get(stage.stage_id, {})}
        stages.append(msgspec.structs.replace(stage, engine_args={**stage.engine_args, **added}))
    return config.with_stage_args(stages)


def _check_engine_args(config: PipelineConfig, model: str) -> list[EngineArgs]:
    """The engine arguments of all vLLM stages; refuses unknown ones before any stage is started."""
    checked = []
    for stage in config.stage_args:
        if stage.runs_vllm:
            try:
                checked.append(create_engine_args(model, engine_type=stage.kind.lower(), **stage.vllm_engine_args))
            except (ValueError, TypeError) as error:
                raise StageConfigError(f"stage {stage.stage_id} ({stage.name}): engine_args: {error}") from error
    return checked


def _modules_to_preload(config: PipelineConfig, engine_args: list[EngineArgs]) -> list[str]:
    """What the stages would import otherwise, each for itself."""
    paths = [stage.custom_process_input_func for stage in config.stage_args]
    paths += [path for args in engine_args for path in (args.worker_cls, args.scheduler_cls) if isinstance(path, str)]
    paths += [OMNI_MODELS.get(stage.engine_args.get("model_arch", "")) for stage in config.stage_args]
    return sorted({path.replace(":", ".").rpartition(".")[0] for path in paths if path is not None})
