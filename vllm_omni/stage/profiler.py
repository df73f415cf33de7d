# SPDX-License-Identifier: Apache-2.0
"""vLLM's profiler, for a stage whose engine is not vLLM's."""

from collections.abc import Mapping
from typing import Any

from vllm.config import ProfilerConfig
from vllm.config.profiler import validate_profile_prefix
from vllm.profiler.wrapper import WorkerProfiler, create_worker_profiler, validate_worker_profiler_config

from vllm_omni.control import StartProfile, StopProfile
from vllm_omni.errors import StageConfigError

NO_PROFILER = "it has no profiler; set profiler_config (--profiler-config)"


def read_profiler_config(given: Mapping[str, Any] | None, where: str) -> ProfilerConfig:
    """
    Args:
        given: vLLM's fields; None: no profiler.
        where: The stage, for messages.

    Raises:
        StageConfigError: A field is wrong.
    """
    try:
        return ProfilerConfig(**(given or {}))
    except (TypeError, ValueError) as error:
        raise StageConfigError(f"{where}: engine_args.profiler_config: {error}") from error


class StageProfiler:
    """Writes a trace of what the thread computes that starts and stops it."""

    def __init__(self, config: ProfilerConfig, stage_id: int) -> None:
        """
        Raises:
            ValueError: The profiler is not for this device.
        """
        validate_worker_profiler_config(config)
        self._config = config
        self._stage_id = stage_id
        self._profiler: WorkerProfiler | None = None

    def control(self, verb: StartProfile | StopProfile) -> None:
        """Does a verb as vLLM's workers do: a start while it runs, and a stop while it does not, do nothing.

        Raises:
            ValueError: The stage has no profiler, or an argument is wrong.
        """
        if self._config.profiler is None:
            raise ValueError(NO_PROFILER)
        if isinstance(verb, StartProfile):
            self._start(verb)
        elif self._profiler is not None:
            self._profiler.stop()

    def _start(self, verb: StartProfile) -> None:
        prefix = validate_profile_prefix(verb.profile_prefix)
        name = f"stage{self._stage_id}" if prefix is None else f"{prefix}_stage{self._stage_id}"
        if self._profiler is None:
            self._profiler = create_worker_profiler(self._config, worker_name=name, local_rank=0)
        self._profiler.set_output_name(name)
        self._profiler.start(delay_iterations=verb.delay_iterations, max_iterations=verb.max_iterations)

    def step(self) -> None:
        """Counts a step of the engine, for `delay_iterations` and `max_iterations`."""
        if self._profiler is not None:
            self._profiler.step()
