# SPDX-License-Identifier: Apache-2.0
"""vLLM's profiler, for a stage whose engine is not vLLM's."""

from typing import Any

from torch.profiler import _ExperimentalConfig
from vllm.config import ProfilerConfig
from vllm.config.profiler import validate_profile_prefix
from vllm.profiler.wrapper import (
    TorchProfilerWrapper,
    WorkerProfiler,
    create_worker_profiler,
    validate_worker_profiler_config,
)

from vllm_omni.control import StartProfile, StopProfile


class ProcessProfiler:
    """Writes traces of all threads of this process."""

    def __init__(self, profiler: WorkerProfiler, name: str) -> None:
        """
        Args:
            name: Of the traces.
        """
        self._profiler = profiler
        self._name = name
        if isinstance(profiler, TorchProfilerWrapper):  # Else it is for the thread that starts it.
            arguments: dict[str, Any] = profiler._profiler_kwargs
            arguments["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)

    def control(self, verb: StartProfile | StopProfile) -> None:
        """Does a verb as vLLM's workers do: a start while it runs, and a stop while it does not, do nothing.

        Raises:
            ValueError: An argument is wrong.
        """
        if isinstance(verb, StopProfile):
            self._profiler.stop()
            return
        prefix = validate_profile_prefix(verb.profile_prefix)
        self._profiler.set_output_name(self._name if prefix is None else f"{prefix}_{self._name}")
        self._profiler.start(delay_iterations=verb.delay_iterations, max_iterations=verb.max_iterations)

    def step(self) -> None:
        """Counts a step of the engine, for `delay_iterations` and `max_iterations`."""
        self._profiler.step()


def make_stage_profiler(config: ProfilerConfig, stage_id: int) -> ProcessProfiler:
    """The profiler of a stage.

    Raises:
        ValueError: It is not for this device.
    """
    validate_worker_profiler_config(config)
    name = f"stage{stage_id}"
    return ProcessProfiler(create_worker_profiler(config, worker_name=name, local_rank=0), name)
