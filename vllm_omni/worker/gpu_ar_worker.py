# SPDX-License-Identifier: Apache-2.0
"""The worker of autoregressive stages on a GPU."""

from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_worker import OmniGPUWorker


class GPUARWorker(OmniGPUWorker):
    omni_runner_cls = GPUARModelRunner
