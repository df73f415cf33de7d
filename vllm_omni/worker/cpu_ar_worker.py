# SPDX-License-Identifier: Apache-2.0
"""The worker of autoregressive stages on the CPU."""

from vllm_omni.worker.cpu_ar_model_runner import CPUARModelRunner
from vllm_omni.worker.cpu_feedback_ar_model_runner import CPUFeedbackARModelRunner
from vllm_omni.worker.cpu_worker import OmniCPUWorker
from vllm_omni.worker.gpu_ar_worker import GPUARWorker


class CPUARWorker(OmniCPUWorker, GPUARWorker):
    omni_runner_cls = CPUARModelRunner
    feedback_runner_cls = CPUFeedbackARModelRunner
