# SPDX-License-Identifier: Apache-2.0
"""Opens a pipeline for a checkpoint: resolves its configuration, starts the stages, and makes its request builder."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.entrypoints.resolve import ResolvedPipeline, fetch_weights, resolve_pipeline
from vllm_omni.entrypoints.start_progress import start_progress
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.extras import install_command
from vllm_omni.launch.cluster import Cluster
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.metrics.observer import PipelineObserver
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.placement.cores import place_cores


@dataclass(frozen=True)
class Pipeline:
    """A running pipeline and its request builder."""

    config: PipelineConfig
    orchestrator: Orchestrator
    builder: RequestBuilder


def open_pipeline(
    server: ForkServer, args: OmniArgs, on_open: Callable[[Callable[[], None]], None] = lambda close: None
) -> Pipeline:
    """Starts a pipeline on a fork server, which it owns from now on, and waits until it accepts requests.

    `on_open` and the errors are those of `OmniBase`.
    """
    resolved = resolve_pipeline(args)
    fetch_weights(resolved, args.model)
    config = resolved.config
    if resolved.engine_args:
        _check_locks()
    has_cluster = config.runtime.distributed_backend is not None
    # In a cluster each stage computes its share of its machine.
    placements = {} if has_cluster else place_cores(config, args.model)
    server.preload(_modules_to_preload(resolved, args.model))
    observers = make_observers(config, args)
    with contextlib.ExitStack() as undo:
        cluster = open_cluster(config, args.init_timeout) if has_cluster else None
        if cluster is not None:
            undo.callback(cluster.close)
        orchestrator = Orchestrator(
            config,
            args.model,
            shm_threshold_bytes=args.shm_threshold_bytes,
            init_timeout=args.init_timeout,
            server=server,
            placements=placements,
            observers=observers,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            # With this variable prometheus_client would write the metrics of all engines to the same files.
            log_stats=args.log_stats and "PROMETHEUS_MULTIPROC_DIR" not in os.environ,
            cluster=cluster,
        )
        undo.pop_all()
    try:
        on_open(orchestrator.close)
        with start_progress(orchestrator.health, [stage.checkpoint(args.model) for stage in config.stage_args]):
            # While the stages start: this process needs its own tokenizer and preprocessor.
            builder = RequestBuilder(config, args.model)
            for observer in observers:
                observer.watch_health(orchestrator.health)
                observer.watch_media_cache(builder.media_cache_counts)
                observer.watch_pause(lambda: orchestrator.is_paused)
            orchestrator.wait_until_started()
    except BaseException:
        orchestrator.close()
        raise
    return Pipeline(config, orchestrator, builder)


def open_cluster(config: PipelineConfig, timeout: float) -> Cluster:
    """The cluster of `runtime.distributed_backend`.

    Raises:
        StageConfigError: Ray is not installed, or a stage names a node that does not exist.
        PipelineStartError: There is no such cluster, or it has not got the resources.
    """
    try:
        from vllm_omni.launch.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise StageConfigError(f"distributed_backend 'ray' needs Ray: {install_command('ray')}") from error
    return RayCluster(config, timeout)


def make_observers(config: PipelineConfig, args: OmniArgs) -> list[PipelineObserver]:
    """The enabled observers.

    Raises:
        PipelineStartError: `trace_file` cannot be written.
        VllmRequirementError: OpenTelemetry is enabled but not installed.
    """
    # Imported on demand, because they import OpenTelemetry or Prometheus; first the observers that may raise.
    observers: list[PipelineObserver] = []
    if args.otlp_traces_endpoint is not None:
        from vllm_omni.metrics.tracing import RequestTracer

        observers.append(RequestTracer(args.otlp_traces_endpoint))
    if args.trace_file is not None:
        from vllm_omni.metrics.timeline import Timeline

        try:
            observers.append(Timeline(args.trace_file, config))
        except OSError as error:
            raise PipelineStartError(f"trace_file {args.trace_file}: cannot be written ({error.strerror})") from error
    if args.log_stats:
        from vllm_omni.metrics.prometheus import PrometheusObserver
        from vllm_omni.metrics.text import SummaryLog

        observers += [SummaryLog(), PrometheusObserver(config)]
    return observers


def _check_locks() -> None:
    """vLLM's executors make locks between processes, even for one.

    Raises:
        PipelineStartError: The system refuses them.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise PipelineStartError(
            f"vLLM's engines need locks in /dev/shm, which cannot be written ({error.strerror}); mount it writable, "
            "in a container with --shm-size=2g or --ipc=host"
        ) from error


def _modules_to_preload(resolved: ResolvedPipeline, model: str) -> list[str]:
    """Modules that each stage would import otherwise. Not the models of other packages: an import that fails there is
    the error of a stage, and would end the server here."""
    stages = resolved.config.stage_args
    paths = [stage.custom_process_input_func for stage in stages]
    paths += [p for args in resolved.engine_args for p in (args.worker_cls, args.scheduler_cls) if isinstance(p, str)]
    paths += [OMNI_MODELS.get(stage.engine_args.get("model_arch", "")) for stage in stages]
    modules = {path.replace(":", ".").rpartition(".")[0] for path in paths if path is not None}
    return sorted(modules.union(*(stage.kind.modules_to_preload(model) for stage in stages)))
