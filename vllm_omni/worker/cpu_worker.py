# SPDX-License-Identifier: Apache-2.0
"""What the omni workers on the CPU share."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.gpu_worker import OmniGPUWorker
from vllm_omni.worker.timer_slack import patient_threads


class OmniCPUWorker(OmniGPUWorker, CPUWorker):
    """vLLM's CPU worker with a runner of ours."""

    def init_device(self) -> None:
        # vLLM's CPU worker has no hook for its runner, so the one it has made, which holds no weights yet, is replaced.
        with patient_threads():
            super().init_device()
        self.model_runner = self._make_model_runner()  # type: ignore[assignment]
