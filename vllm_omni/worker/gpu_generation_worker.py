# SPDX-License-Identifier: Apache-2.0
"""The worker of one-step generation stages on a GPU."""

from typing import Any, cast

import torch
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.engine.settings import SHARES_PROCESS
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.gpu_worker import OmniGPUWorker


class GPUGenerationWorker(OmniGPUWorker):
    omni_runner_cls = GPUGenerationModelRunner

    def init_device(self) -> None:
        """vLLM's. It bounds a stage's memory by the size of its KV cache; here torch has to, since there is none."""
        super().init_device()
        assert self.device is not None
        additional = cast(dict[str, Any], self.vllm_config.additional_config)
        if self.device.type == "cuda" and not additional.get(SHARES_PROCESS):
            torch.cuda.set_per_process_memory_fraction(self.cache_config.gpu_memory_utilization, self.device)

    def release_stream(self, stream_id: str) -> None:
        """Forgets what the model remembers of a stream."""
        runner = self.model_runner
        assert isinstance(runner, GPUGenerationModelRunner)
        runner.streams.release(stream_id)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Only seeds, as vLLM's does in the end: there are no graphs, no sampler and no KV cache to warm up."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
