# SPDX-License-Identifier: Apache-2.0
"""Workers and model runners: vLLM's, with the hooks of `model_executor.interfaces` around the forward."""

_WORKERS = {
    ("ar", False): "vllm_omni.worker.gpu_ar_worker.GPUARWorker",
    ("ar", True): "vllm_omni.worker.cpu_ar_worker.CPUARWorker",
    ("generation", False): "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker",
    ("generation", True): "vllm_omni.worker.cpu_generation_worker.CPUGenerationWorker",
}


def worker_class_path(engine_type: str, is_cpu: bool) -> str:
    """The worker of a stage: the one place where CPU and GPU part.

    Args:
        engine_type: `ar` or `generation`.
        is_cpu: Whether vLLM's platform is the CPU.
    """
    return _WORKERS[engine_type, is_cpu]
