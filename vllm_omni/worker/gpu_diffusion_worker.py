# SPDX-License-Identifier: Apache-2.0
"""The device of a diffusion stage: its weights, and smaller batches where its memory is too small."""

import gc
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from vllm.platforms import current_platform

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import CannotSplitError, ModuleCall, compute
from vllm_omni.diffusion.job import JobEnd, RunningJob
from vllm_omni.diffusion.join_check import JoinChecks, are_close, precision_of
from vllm_omni.diffusion.loader import denoiser_names, load_pipeline, resolve_dtype
from vllm_omni.diffusion.parallel_denoiser import FollowerError, ParallelDenoisers, init_device
from vllm_omni.diffusion.pipeline_call import modules_of
from vllm_omni.metrics.logs import get_logger
from vllm_omni.metrics.memory import release_free_memory
from vllm_omni.worker.gpu_diffusion_model_runner import DiffusionModelRunner

logger = get_logger(__name__)

_MAX_LIMITS = 1000


class DiffusionGPUWorker:
    """Holds one loaded pipeline; on the CPU without an accelerator.

    Attributes:
        unbatched: Networks whose calls are never joined, because their rows are not independent.
        sleep_level: Of the last `sleep`; 0: it is awake.
    """

    def __init__(self, model: str, config: DiTConfig, memory: float | int | None) -> None:
        """
        Args:
            memory: Its share of an accelerator's memory: a fraction, or bytes; None: all.
        """
        self._model = model
        self._config = config
        self._memory = memory
        self._device = torch.device(current_platform.device_type)
        self.unbatched: list[str] = []
        self.sleep_level = 0
        self._asleep: list[nn.Module] = []
        self._limits: dict[Hashable, int] = {}  # by function or layout: the largest batch to try
        self._checks = JoinChecks()
        self._apart: set[Hashable] = set()  # functions whose calls are never joined
        self._ranks: ParallelDenoisers | None = None
        self._runner: DiffusionModelRunner

    def init_device(self) -> None:
        self._device = init_device(0, self._memory)

    def load_model(self, on_failure: Callable[[], None], *, copies: bool = False) -> DiffusionModelRunner:
        """
        Args:
            on_failure: Called from any thread when a process of the denoiser has ended.
            copies: The weights may be files in memory, which others overwrite: nothing remains a view of them.

        Raises:
            StageConfigError: The checkpoint or a setting cannot be used.
        """
        if self._config.world_size > 1:
            names = denoiser_names(self._model, self._config)
            self._ranks = ParallelDenoisers(self._model, self._config, self._memory, on_failure)
        try:
            pipe = load_pipeline(self._model, self._config, self._device)
            if copies:
                _copy_weights(pipe)
            if self._ranks is not None:
                self._ranks.join({name: pipe.components[name] for name in names}, self._device)
            self._runner = DiffusionModelRunner(pipe, self._config, self._device)
        except BaseException:
            self.close()
            raise
        return self._runner

    def sleep(self, level: int) -> None:
        """Gives the memory of the weights back. 1: they move to the host. 2: they are dropped, and the pipeline is of
        no use any more."""
        kind = self._device.type
        if self.sleep_level == 0:
            networks = self._runner.networks
            self._asleep = [it for it in networks if {part.device.type for part in it.parameters()} == {kind}]
        for module in self._asleep:
            if level == 1:
                nn.Module.to(module, "cpu")
            else:
                _drop_weights(module)
        self.sleep_level = max(level, self.sleep_level)
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        release_free_memory()

    def wake_up(self) -> bool:
        """Takes the memory again after level 1. Returns whether the weights are there."""
        if self.sleep_level == 1:
            for module in self._asleep:
                nn.Module.to(module, self._device)
            self.sleep_level = 0
        return self.sleep_level == 0

    def close(self) -> None:
        """Ends the denoiser's other processes."""
        if self._ranks is not None:
            self._ranks.close()

    def max_batch_size(self, call: ModuleCall) -> int:
        """How many calls like this one can be computed as one, as far as known."""
        if call.function in self._apart or self._config.cache_backend is not None:  # A cache is of all rows.
            return 1
        return min(self._limits.get(key, sys.maxsize) for key in (call.function, call.layout))

    def synchronize(self) -> None:
        """Waits until the device has computed what was given to it."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def execute(self, batch: Sequence[RunningJob]) -> list[JobEnd]:
        """Computes the module calls that these jobs wait for as one, and continues each job. Returns those that
        ended."""
        calls = [running.waiting_call for running in batch]
        try:
            self._runner.activate(batch[0].job.adapter)
        except Exception as error:  # It was loaded before, and has been removed for others.
            outputs: list[Any] = [error] * len(batch)
        else:
            outputs = self._compute(calls)
        ends = []
        for running, output in zip(batch, outputs, strict=True):
            if self._runner.changed and running is not self._runner.running[0]:
                continue  # One before it has changed networks. This one's call is computed again when that has ended.
            ends.append(self._runner.resume(running, output))
        return [end for end in ends if end is not None]

    def _compute(self, batch: Sequence[ModuleCall]) -> list[Any]:
        """The output of each module call, or the exception that it raised alone.

        A batch that fails is tried again in halves: it was too large for the memory, or one of the calls raises.

        Raises:
            torch.AcceleratorError: The device is in an unusable state.
            FollowerError: The denoiser's processes are.
        """
        try:
            unchecked = self._checks.find_unchecked(batch) if len(batch) > 1 else None
            outputs = compute(batch, copies_shared=unchecked is not None)
            return outputs if unchecked is None else self._check(batch, outputs, unchecked)
        except (torch.AcceleratorError, FollowerError):
            raise
        except Exception as error:
            if len(batch) == 1:
                return [error]
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning("a batch of %d failed (%s); trying again in halves", len(batch), reason)
            key = batch[0].function if isinstance(error, CannotSplitError) else batch[0].layout
        # After the except block: an exception that is being handled keeps the tensors of the step that failed.
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        middle = len(batch) // 2
        outputs = [*self._compute(batch[:middle]), *self._compute(batch[middle:])]
        if not any(isinstance(output, Exception) for output in outputs):
            self._limit(key, middle)  # No single call raises.
        return outputs

    def _check(self, batch: Sequence[ModuleCall], outputs: list[Any], differing: set[int]) -> list[Any]:
        """The outputs of a joint call, if each call has the same alone. Otherwise those that they have alone, and the
        network's calls are not joined again."""
        precision = precision_of(resolve_dtype(self._config, self._device), self._device)
        alone = [compute([call])[0] for call in batch]
        if all(are_close(*pair, precision) for pair in zip(outputs, alone, strict=True)):
            self._checks.record(batch, differing)
            return outputs
        function = batch[0].function
        name = self._runner.name_of(function)
        logger.warning("%s: a batch of several requests has other results than each alone; it gets no more", name)
        self.unbatched = [*self.unbatched, name]
        self._apart.add(function)
        return alone

    def _limit(self, key: Hashable, max_batch_size: int) -> None:
        """Later batches are not larger than this."""
        if len(self._limits) >= _MAX_LIMITS:
            self._limits.clear()
        self._limits[key] = min(max_batch_size, self._limits.get(key, max_batch_size))


def _drop_weights(module: nn.Module) -> None:
    for part in module.modules():
        parameters = part.named_parameters(recurse=False, remove_duplicate=False)
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for name, _ in [*parameters, *buffers]:
            delattr(part, name)


def _copy_weights(pipe: DiffusionPipeline) -> None:
    for module in modules_of(pipe).values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
