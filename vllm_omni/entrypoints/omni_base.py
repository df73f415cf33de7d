# SPDX-License-Identifier: Apache-2.0
"""What the offline and the asynchronous face of a pipeline have in common: its start, its end, and how it is."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from vllm_omni.entrypoints.launch import launch_pipeline

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm_omni.config.stage_config import PipelineConfig
    from vllm_omni.entrypoints.request_builder import RequestBuilder
    from vllm_omni.metrics.stats import StageStats
    from vllm_omni.orchestrator.fork_server import ForkServer
    from vllm_omni.orchestrator.supervisor import StageHealth


class OmniBase:
    """A pipeline of stages, each an engine in its own process. Ends with the object, or with the interpreter."""

    def __init__(
        self,
        model: str,
        stage_configs_path: str | None = None,
        *,
        stage_overrides: Mapping[str | int, Mapping[str, Any]] | None = None,
        log_stats: bool = False,
        trace_file: str | None = None,
        init_timeout: float = 600.0,
        stage_init_timeout: float | None = None,
        request_timeout_s: float | None = None,
        max_inflight: int | None = None,
        max_queued: int | None = None,
        shm_threshold_bytes: int = 65536,
        fork_server: ForkServer | None = None,
        **engine_args: Any,
    ) -> None:
        """
        Args:
            model: A checkpoint: a directory, or a name on the Hugging Face hub. A stage can have one of its own
                (`engine_args.model`), which may be a folder in this one.
            stage_configs_path: A stage configuration (YAML), or the name of one that ships, without `.yaml`;
                by default the one for the model, and for any diffusers pipeline a single stage that runs it.
            stage_overrides: For single stages, by name or id: `{"talker": {"engine_args": {...}, "runtime": {...},
                "default_sampling_params": {...}}}`; any other key is an engine argument.
            log_stats: Log a summary of each request, and export statistics to vLLM's Prometheus registry.
            trace_file: Write a timeline of all requests to this file; it opens in Perfetto.
            init_timeout: Seconds that the stages may take to become ready, all together.
            stage_init_timeout: Seconds that a single stage may take, at the start and after a restart.
            request_timeout_s: Seconds after which a request fails with `RequestTimeoutError`; 0: no limit.
            max_inflight: Requests that the pipeline works on at once.
            max_queued: Requests that wait beyond that, until callers wait (or get `PipelineFullError`).
            shm_threshold_bytes: Data of at least this size passes between stages through shared memory.
            fork_server: One that was started before (`launch.start_fork_server`), to be taken over.
            engine_args: Arguments of vLLM's `EngineArgs` (`dtype`, `max_model_len`, ...) for every vLLM stage, and of
                `DiTConfig` (`dtype`, `vae_tiling`, ...) for every diffusion stage.

        What is None is as the stage configuration says.

        Raises:
            VllmRequirementError: vLLM is missing or has another version.
            StageConfigError: The stage configuration or an argument is wrong.
            PipelineStartError: The system refuses what the pipeline needs, e.g. files or memory.
            StageStartError: A stage failed to start, or took too long.
        """
        self._pipeline = launch_pipeline(
            model,
            stage_configs_path,
            stage_overrides=stage_overrides or {},
            runtime_overrides={
                "stage_init_timeout": stage_init_timeout,
                "request_timeout_s": request_timeout_s,
                "max_inflight": max_inflight,
                "max_queued": max_queued,
            },
            init_timeout=init_timeout,
            shm_threshold_bytes=shm_threshold_bytes,
            log_stats=log_stats,
            trace_file=trace_file,
            fork_server=fork_server,
            engine_args=engine_args,
        )
        # Also runs when the interpreter exits, so that a forgotten close() leaves no process behind.
        self._finalizer = weakref.finalize(self, self._pipeline.orchestrator.close)

    @property
    def config(self) -> PipelineConfig:
        """The stages, with all arguments applied."""
        return self._pipeline.config

    @property
    def builder(self) -> RequestBuilder:
        """What turns prompts into requests; for who renders prompts himself, as an API server does."""
        return self._pipeline.builder

    @property
    def voices(self) -> list[str]:
        """What a prompt can name as `additional_information={"speaker": ...}`, the default voice first."""
        return self._pipeline.builder.voices

    @property
    def is_open(self) -> bool:
        """False as soon as `close()` was called."""
        return self._finalizer.alive

    def health(self) -> list[StageHealth]:
        """How each stage is: `starting`, `ready`, `restarting` or `dead`, in stage order."""
        return self._pipeline.orchestrator.health()

    def stats(self) -> list[StageStats]:
        """The last snapshot of each stage: what it holds, and totals since its process started.

        A stage sends a snapshot every 0.05 seconds while it works, and one when it becomes idle.

        Raises:
            PipelineClosedError: `close()` was called.
        """
        return self._pipeline.orchestrator.stats()

    def stats_table(self) -> str:
        """`stats()` as a table to print."""
        from vllm_omni.metrics.text import format_stage_table

        return format_stage_table(self.stats())

    def close(self) -> None:
        """Ends all stages. Running requests fail with `RequestAbortedError`. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
