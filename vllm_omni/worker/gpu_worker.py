# SPDX-License-Identifier: Apache-2.0
"""The workers on a GPU: they build our model runners, can discard a failed step, and report a broken device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.feedback import SupportsFeedback
from vllm_omni.model_executor.interfaces import SupportsBatchSize
from vllm_omni.worker.feedback_ar_model_runner import FeedbackARModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.gpu_text_model_runner import GPUTextModelRunner
from vllm_omni.worker.weights_beside import WeightsBesideWorker

_BROKEN_DEVICE = "the device cannot be used any more: "


@contextlib.contextmanager
def _mark_broken_device() -> Iterator[None]:
    """vLLM's multiprocess executor transfers an exception's text, and not its class."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise torch.AcceleratorError(f"{_BROKEN_DEVICE}{error}") from error


def is_device_broken(error: Exception) -> bool:
    """Whether an exception out of a step, of a worker in this process or in another, means a broken device."""
    return isinstance(error, torch.AcceleratorError) or _BROKEN_DEVICE in str(error)


class OmniGPUWorker(WeightsBesideWorker):
    """vLLM's worker. Subclasses name the model runner."""

    omni_runner_cls: ClassVar[type[OmniGPUModelRunner]]

    def _make_model_runner(self) -> GPUModelRunner:
        assert self.device is not None
        if self.use_v2_model_runner:
            return cast(GPUModelRunner, GPUTextModelRunner(self.vllm_config, self.device))
        return self._choose_model_runner()(self.vllm_config, self.device)

    def _choose_model_runner(self) -> type[OmniGPUModelRunner]:
        """Called once, before anything is loaded."""
        return self.omni_runner_cls

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        with _mark_broken_device():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        with _mark_broken_device():
            return super().sample_tokens(grammar_output)

    def discard_step(self) -> list[str]:
        """Discards the step that raised. Returns the ids of all requests that the runner holds."""
        runner: Any = self.model_runner
        assert isinstance(runner, OmniGPUModelRunner | GPUTextModelRunner)
        return runner.discard_step()


class GPUARWorker(OmniGPUWorker):
    """The worker of autoregressive stages. The class of the model selects one of two model runners."""

    omni_runner_cls = GPUARModelRunner
    feedback_runner_cls: ClassVar[type[FeedbackARModelRunner]] = FeedbackARModelRunner

    def _choose_model_runner(self) -> type[OmniGPUModelRunner]:
        has_feedback = issubclass(get_model_cls(self.model_config), SupportsFeedback)
        return self.feedback_runner_cls if has_feedback else self.omni_runner_cls

    def watch_sound_cache(self) -> Callable[[], CacheCounts] | None:
        """Reads hits and queries of encoded reference sounds; None of a model that encodes none. For callers in this
        process."""
        runner = self.model_runner
        if not isinstance(runner, FeedbackARModelRunner) or runner.strategy.sound_cache is None:
            return None

        def read() -> CacheCounts:
            cache = runner.strategy.sound_cache  # That of the weights that are computed with now.
            return CacheCounts() if cache is None else cache.counts

        return read


class GPUGenerationWorker(OmniGPUWorker):
    """The worker of one-step generation stages."""

    omni_runner_cls = GPUGenerationModelRunner

    def init_device(self) -> None:
        """vLLM bounds a stage's memory by the size of its KV cache. Here is no KV cache, so torch bounds it."""
        super().init_device()
        assert self.device is not None
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self.cache_config.gpu_memory_utilization, self.device)

    def batch_tokens(self) -> int | None:
        """See `OmniGenerationScheduler`."""
        model = self.get_model()
        return model.batch_rows if isinstance(model, SupportsBatchSize) else None

    def release_state(self, request_id: str) -> None:
        """Removes the model's state of a request."""
        runner = self.model_runner
        assert isinstance(runner, GPUGenerationModelRunner)
        runner.states.release(request_id)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Seeds, as vLLM's does at its end: no graphs, sampler or KV cache need a warm-up."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
