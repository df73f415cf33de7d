# SPDX-License-Identifier: Apache-2.0
"""What all omni workers share: they build a runner of ours, can give up a step, and name a broken device."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

_BROKEN_DEVICE = "the device cannot be used any more: "


@contextlib.contextmanager
def _name_broken_device() -> Iterator[None]:
    """vLLM's multiprocess executor passes on an exception's text, and not its class."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise torch.AcceleratorError(f"{_BROKEN_DEVICE}{error}") from error


def is_device_broken(error: Exception) -> bool:
    """Whether an exception out of a step, of a worker in this process or in another, says that of its device."""
    return isinstance(error, torch.AcceleratorError) or _BROKEN_DEVICE in str(error)


class OmniGPUWorker(Worker):
    """vLLM's worker. Subclasses name the model runner."""

    omni_runner_cls: ClassVar[type[OmniGPUModelRunner]]

    def _make_model_runner(self) -> GPUModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("stages run on vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        assert self.device is not None
        return self._choose_model_runner()(self.vllm_config, self.device)

    def _choose_model_runner(self) -> type[OmniGPUModelRunner]:
        """Asked once, before anything is loaded."""
        return self.omni_runner_cls

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        with _name_broken_device():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        with _name_broken_device():
            return super().sample_tokens(grammar_output)

    def abandon_step(self) -> list[str]:
        """Forgets the step that raised. Returns all requests that the runner knows."""
        runner = self.model_runner
        assert isinstance(runner, OmniGPUModelRunner)
        return runner.abandon_step()
