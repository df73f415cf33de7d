# SPDX-License-Identifier: Apache-2.0
"""The model runner of autoregressive stages on the CPU: the GPU's, over vLLM's CPU runner."""

from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner


class CPUARModelRunner(GPUARModelRunner, CPUModelRunner):
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        """Keeps the generators of requests that do not sample yet out of this step.

        vLLM draws for them too, and then winds their generators back, which a CPU generator cannot do: a request with
        a seed and a chunked prefill would raise, and take its batch along.
        """
        generators = self.input_batch.generators
        if self.execute_model_state is None or not generators:
            return super().sample_tokens(grammar_output)
        idle = {i: generators.pop(i) for i, span in enumerate(self.spans) if i in generators and not span.samples}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(idle)
