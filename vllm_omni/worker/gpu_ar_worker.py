# SPDX-License-Identifier: Apache-2.0
"""The worker of autoregressive stages on a GPU."""

from typing import ClassVar

from vllm.model_executor.model_loader.utils import get_model_cls

from vllm_omni.model_executor.feedback import SupportsFeedback
from vllm_omni.worker.feedback_ar_model_runner import FeedbackARModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.gpu_worker import OmniGPUWorker


class GPUARWorker(OmniGPUWorker):
    """Has two model runners; which one a model needs, its class says."""

    omni_runner_cls = GPUARModelRunner
    feedback_runner_cls: ClassVar[type[FeedbackARModelRunner]] = FeedbackARModelRunner

    def _choose_model_runner(self) -> type[OmniGPUModelRunner]:
        has_feedback = issubclass(get_model_cls(self.model_config), SupportsFeedback)
        return self.feedback_runner_cls if has_feedback else self.omni_runner_cls
