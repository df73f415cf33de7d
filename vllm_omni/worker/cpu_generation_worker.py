# SPDX-License-Identifier: Apache-2.0
"""The worker of one-step generation stages on the CPU."""

from vllm_omni.worker.cpu_generation_model_runner import CPUGenerationModelRunner
from vllm_omni.worker.cpu_worker import OmniCPUWorker
from vllm_omni.worker.gpu_generation_worker import GPUGenerationWorker


class CPUGenerationWorker(OmniCPUWorker, GPUGenerationWorker):
    omni_runner_cls = CPUGenerationModelRunner
