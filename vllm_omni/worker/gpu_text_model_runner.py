# SPDX-License-Identifier: Apache-2.0
"""The model runner of stages of text that need none of ours: vLLM's V2 model runner, which can discard a step."""

from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_omni.errors import StageConfigError
from vllm_omni.worker.gpu_model_runner import ModelHooks


class GPUTextModelRunner(GPUModelRunner):
    """vLLM's V2 model runner. A token depends on the request's seed and the token's position only, so a step that
    is computed again draws the same."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.get_model()
        if ModelHooks.of(model) != ModelHooks():
            raise StageConfigError(
                f"{type(model).__name__} has hooks, and no installed package declares it: declare it in a "
                "ModelPackage, or set the stage's async_scheduling to false"
            )

    def discard_step(self) -> list[str]:
        """Discards the step that raised. Returns the ids of all requests that are held here."""
        torch.accelerator.synchronize()  # Steps in flight read the buffers that are written below.
        self.execute_model_state = None
        # Else what is staged would be written together with what the next request in the same place stages.
        self.req_states.apply_staged_writes()
        self.model_state.apply_staged_writes()
        self.block_tables.apply_staged_writes()
        if self.sampler is not None:
            self.sampler.apply_staged_writes()
        return list(self.req_states.req_id_to_index)
