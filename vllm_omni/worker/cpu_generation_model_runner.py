# SPDX-License-Identifier: Apache-2.0
"""The model runner of one-step generation stages on the CPU: the GPU's, over vLLM's CPU runner."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner


class CPUGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    pass
