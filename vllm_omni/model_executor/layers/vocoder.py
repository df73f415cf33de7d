# SPDX-License-Identifier: Apache-2.0
"""The base of vocoders: vLLM's model interface for a one-step model."""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader


class Vocoder(nn.Module):
    """Turns codes into waveforms; see `SupportsOneStepGeneration`.

    Attributes:
        checkpoint_prefix: Of the names of its weights in the checkpoint; its own have it too.
    """

    is_attention_free: ClassVar[Literal[True]] = True
    checkpoint_prefix: ClassVar[str]

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
        own = ((name, tensor) for name, tensor in weights if name.startswith(self.checkpoint_prefix))
        return AutoWeightsLoader(self).load_weights(own)


def load_own(module: nn.Module, weights: dict[str, torch.Tensor]) -> set[str]:
    """Loads the parameters and buffers that a module has. Returns the names of its parameters."""
    module.load_state_dict({name: weights[name] for name in module.state_dict() if name in weights})
    return {name for name, _ in module.named_parameters()}
