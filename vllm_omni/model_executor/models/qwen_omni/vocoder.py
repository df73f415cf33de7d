# SPDX-License-Identifier: Apache-2.0
"""The base of both vocoders: vLLM's model interface for a one-step model."""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper


class QwenOmniVocoder(nn.Module):
    """Turns codes into waveforms; see `SupportsOneStepGeneration`.

    Attributes:
        checkpoint_prefix: Of the names of its weights.
    """

    is_attention_free: ClassVar[Literal[True]] = True
    checkpoint_prefix: ClassVar[str]
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"thinker.": None, "talker.": None})

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM's loader skips files that hold only other stages' weights."""
        return not name.startswith(self.checkpoint_prefix)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Required by vLLM of every model, never called: the ids are placeholders."""
        raise NotImplementedError("the vocoder reads its codes from additional_information")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Required by vLLM of every model that generates, never called: nothing is sampled."""
        raise NotImplementedError("the vocoder samples no tokens")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
