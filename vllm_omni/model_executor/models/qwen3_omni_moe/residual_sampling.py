# SPDX-License-Identifier: Apache-2.0
"""How the residual codes of a frame are drawn, and what a frame is. This file knows no model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

SAMPLING_TOP_K = 50
"""Residual codes are drawn from the 50 likeliest (the reference fixes it, whatever the talker's own top_k)."""

SAMPLING_TOP_P = 0.8
"""Nucleus of the residual codes, fixed by the reference as well."""


@dataclass(frozen=True, slots=True)
class ResidualSampling:
    """How to draw the residual codes of one frame; requests that are greedy may stand in the same batch.

    Attributes:
        top_p: `[B, 1]` float32; 0 takes the likeliest code.
        noise: `[B, num_code_groups - 1, SAMPLING_TOP_K]` float32, exponentially distributed.
    """

    top_p: torch.Tensor
    noise: torch.Tensor

    def sample(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """`[B, vocab]` logits -> `[B]` ids: top-k, then top-p, then the exponential race."""
        top_k = min(SAMPLING_TOP_K, logits.shape[-1])
        values, ids = logits.float().topk(top_k, dim=-1)  # descending
        probs = values.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the likelier codes
        outside = before >= self.top_p
        outside[:, 0] = False
        choice = (probs.masked_fill(outside, 0.0) / self.noise[:, step, :top_k]).argmax(-1, keepdim=True)
        return ids.gather(-1, choice).squeeze(-1)


class Frame(NamedTuple):
    """The residual part of one frame of `B` requests.

    Attributes:
        codes: `[B, num_code_groups - 1]` int64.
        embeds: `[B, hidden]`, the sum of the embeddings of these codes.
    """

    codes: torch.Tensor
    embeds: torch.Tensor
