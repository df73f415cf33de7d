# SPDX-License-Identifier: Apache-2.0
"""What autoregressive model runners on the CPU share: seeds of requests that take part in a step and do not sample."""

from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class CPUIdleGenerators(GPUModelRunner):
    """Comes before vLLM's runner in the order of bases, and after ours."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        """Keeps the generators of requests that do not sample yet out of this step.

        vLLM draws for them too, and then winds their generators back, which a CPU generator cannot do: a request with
        a seed and a chunked prefill would raise, and take its batch along.
        """
        sample_tokens: Any = super().sample_tokens  # whose type its decorator hides
        generators = self.input_batch.generators
        if self.execute_model_state is None or not generators:
            return sample_tokens(grammar_output)
        idle = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        kept = {index: generators.pop(index) for index in idle if index in generators}
        try:
            return sample_tokens(grammar_output)
        finally:
            generators.update(kept)
