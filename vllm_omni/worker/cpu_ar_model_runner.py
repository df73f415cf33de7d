# SPDX-License-Identifier: Apache-2.0
"""The model runner of autoregressive stages on the CPU: the GPU's, over vLLM's CPU runner."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.worker.cpu_idle_generators import CPUIdleGenerators
from vllm_omni.worker.cpu_lora import CPULoRA
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner


class CPUARModelRunner(GPUARModelRunner, CPUIdleGenerators, CPULoRA, CPUModelRunner):
    pass
