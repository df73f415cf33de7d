# SPDX-License-Identifier: Apache-2.0
"""Workers and model runners: LoRA on a CPU leaves out the rows of requests without an adapter."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner as CPULoRARunner

__all__ = ["CPULoRARunner"]
