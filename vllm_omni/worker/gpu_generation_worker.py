# SPDX-License-Identifier: Apache-2.0
"""The worker of one-step generation stages on a GPU."""

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.gpu_worker import OmniGPUWorker


class GPUGenerationWorker(OmniGPUWorker):
    omni_runner_cls = GPUGenerationModelRunner

    def release_stream(self, stream_id: str) -> None:
        """Forgets what the model remembers of a stream."""
        runner = self.model_runner
        assert isinstance(runner, GPUGenerationModelRunner)
        runner.streams.release(stream_id)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Only seeds, as vLLM's does in the end: there are no graphs, no sampler and no KV cache to warm up."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
