# SPDX-License-Identifier: Apache-2.0
"""The first stage: a Llama that reads bytes of text and writes notes."""

from collections.abc import Iterable

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

PREFIX = "composer."
"""Of its weights in the checkpoint, which has those of both stages."""


class TuneComposer(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """`[N, hidden]` -> `[N, vocab]`. Text is never sung."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, : self.config.end_id] = float("-inf")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((name.removeprefix(PREFIX), w) for name, w in weights if name.startswith(PREFIX))
