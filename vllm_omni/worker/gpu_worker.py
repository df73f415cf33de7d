# SPDX-License-Identifier: Apache-2.0
"""What all omni workers share: they build a runner of ours and can give up a step."""

from typing import ClassVar

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.timer_slack import patient_threads


class OmniGPUWorker(Worker):
    """vLLM's worker. Subclasses name the model runner."""

    omni_runner_cls: ClassVar[type[OmniGPUModelRunner]]

    def init_device(self) -> None:
        with patient_threads():
            super().init_device()

    def _make_model_runner(self) -> GPUModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("stages run on vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        assert self.device is not None
        return self._choose_model_runner()(self.vllm_config, self.device)

    def _choose_model_runner(self) -> type[OmniGPUModelRunner]:
        """Asked once, before anything is loaded."""
        return self.omni_runner_cls

    def abandon_step(self) -> list[str]:
        """Forgets the step that raised. Returns all requests that the runner knows."""
        runner = self.model_runner
        assert isinstance(runner, OmniGPUModelRunner)
        return runner.abandon_step()
