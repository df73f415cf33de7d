# SPDX-License-Identifier: Apache-2.0
"""The bases of vocoders: vLLM's model interface for a one-step model, and the sizes of pieces and batches."""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.platforms import current_platform

PIECE_FRAMES = 320
"""Frames of one request in one batch."""

MAX_BATCH_FRAMES = 8 * PIECE_FRAMES
"""Frames of one batch, padding included: bounds the memory of the widest activation."""

ACTIVATION_COPIES = 6
"""Tensors of the size of the widest activation that are needed at the same time, an upper estimate."""

MAX_BATCH_FRAMES_CPU = 64
"""Larger batches run slower than one by one on a CPU: their activations do not fit into its caches."""

STEP_BATCHES = 4
"""Batches of one step: windows of about the same length share one, and of more windows more are as long."""


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


class BatchedVocoder(Vocoder):
    """Decodes windows of many requests as batches, and a window of many frames as several pieces, which bounds memory.

    Attributes:
        hop: Samples of a frame.
        max_batch_frames: Frames of one batch, padding included.
    """

    hop: int

    def __init__(self) -> None:
        super().__init__()
        self.max_batch_frames = MAX_BATCH_FRAMES_CPU if current_platform.is_cpu() else MAX_BATCH_FRAMES

    @property
    def batch_rows(self) -> int:
        """See `SupportsBatchSize`."""
        return STEP_BATCHES * self.max_batch_frames

    def next_piece(self, num_frames: int) -> int:
        """Frames of the next piece of a window."""
        return piece_length(num_frames, min(PIECE_FRAMES, self.max_batch_frames))

    def widest_bytes(self, num_frames: int, channels: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a step, an upper estimate.

        Args:
            num_frames: Those that are decoded, of all requests.
            channels: Values for each sample in the widest layer, of this `dtype`.
        """
        return ACTIVATION_COPIES * min(num_frames, MAX_BATCH_FRAMES) * self.hop * channels * dtype.itemsize


def piece_length(num_frames: int, max_frames: int) -> int:
    """Frames of the next piece; all pieces have about the same length."""
    return -(-num_frames // -(-num_frames // max_frames))


def load_own(module: nn.Module, weights: dict[str, torch.Tensor]) -> set[str]:
    """Loads the parameters and buffers that a module has. Returns the names of its parameters."""
    module.load_state_dict({name: weights[name] for name in module.state_dict() if name in weights})
    return {name for name, _ in module.named_parameters()}
