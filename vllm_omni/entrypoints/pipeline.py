# SPDX-License-Identifier: Apache-2.0
"""Opens a pipeline for a checkpoint: has its configuration resolved, checks all arguments, starts the stages.

Shared by the offline and the asynchronous face.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.entrypoints.resolve import resolve_pipeline
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.observer import PipelineObserver
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.orchestrator.fork_server import ForkServer
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.stage.cores import place_cores


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
    config = resolve_pipeline(
        model,
        stage_configs_path,
        stage_overrides=stage_overrides,
        runtime_overrides=runtime_overrides,
        engine_args=engine_args,
    ).config
    placements = place_cores(config)
    server.preload(_modules_to_preload(config, check_engine_args(config, model), model))
    traces_endpoint = engine_args.get("otlp_traces_endpoint")
    observers = make_observers(config, log_stats=log_stats, trace_file=trace_file, otlp_traces_endpoint=traces_endpoint)
    orchestrator = Orchestrator(
        config,
        model,
        shm_threshold_bytes=shm_threshold_bytes,
        init_timeout=init_timeout,
        server=server,
        placements=placements,
        observers=observers,
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


def make_observers(
    config: PipelineConfig,
    *,
    log_stats: bool = False,
    trace_file: str | None = None,
    otlp_traces_endpoint: str | None = None,
) -> list[PipelineObserver]:
    """The observers for these options.

    Args:
        config: The pipeline.
        log_stats: Log a summary of each request, and export statistics to Prometheus.
        trace_file: Write a timeline of all requests to this file.
        otlp_traces_endpoint: Send OpenTelemetry spans there.

    Raises:
        OSError: `trace_file` cannot be written.
    """
    # Imported where used, because they load OpenTelemetry or Prometheus; first those that may raise.
    observers: list[PipelineObserver] = []
    if otlp_traces_endpoint is not None:
        from vllm_omni.metrics.tracing import RequestTracer

        observers.append(RequestTracer(otlp_traces_endpoint))
    if trace_file is not None:
        from vllm_omni.metrics.timeline import Timeline

        observers.append(Timeline(trace_file, config))
    if log_stats:
        from vllm_omni.metrics.prometheus import PrometheusObserver
        from vllm_omni.metrics.text import SummaryLog

        observers += [SummaryLog(), PrometheusObserver(config)]
    return observers


def check_engine_args(config: PipelineConfig, model: str) -> list[EngineArgs]:
    """The engine arguments of all vLLM stages; refuses wrong ones, of any stage, before one is started.

    Raises:
        StageConfigError: A stage has an argument that its engine does not know, or that has a wrong value.
    """
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
