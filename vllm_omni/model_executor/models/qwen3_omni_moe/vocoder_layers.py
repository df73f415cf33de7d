# SPDX-License-Identifier: Apache-2.0
"""The vocoder's most frequent layers with fewer passes over their activations, which are far larger than any cache.

Each takes the parameters of the HF transformers layer that it replaces, under the same names, and computes the same.
"""

from typing import cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeSnakeBeta,
)


class SnakeBeta(nn.Module):
    """`x + sin(x * exp(alpha))**2 / exp(beta)` for each channel, in four passes and one buffer."""

    def __init__(self, snake: Qwen3OmniMoeSnakeBeta) -> None:
        super().__init__()
        self.alpha = snake.alpha
        self.beta = snake.beta
        self.eps = snake.no_div_by_zero

    def forward(self, x: torch.Tensor, num_zeros: int = 0) -> torch.Tensor:
        """`[B, C, L]` -> `[B, C, num_zeros + L]`, zeros first: the padding of the causal convolution that follows."""
        batch, channels, length = x.shape
        whole = x.new_empty(batch, channels, num_zeros + length)
        whole[..., :num_zeros] = 0
        wave = whole[..., num_zeros:]
        torch.mul(x, self.alpha.exp()[:, None], out=wave)
        wave.sin_().mul_((self.beta.exp() + self.eps).rsqrt()[:, None])
        torch.addcmul(x, wave, wave, out=wave)
        return whole


class ResidualUnit(nn.Module):
    """Activation, dilated causal convolution, activation, pointwise convolution, and the sum with its input."""

    def __init__(self, unit: Qwen3OmniMoeCode2WavDecoderResidualUnit) -> None:
        super().__init__()
        self.act1 = SnakeBeta(unit.act1)
        self.conv1 = unit.conv1
        self.act2 = SnakeBeta(unit.act2)
        self.conv2 = unit.conv2

    @property
    def bias(self) -> torch.Tensor:
        return cast(torch.Tensor, self.conv2.conv.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, C, L]` -> the same shape, in the same memory."""
        hidden = self.act2(self.conv1.conv(self.act1(x, num_zeros=self.conv1.padding)))
        pointwise = self.conv2.conv.weight[..., 0].expand(x.shape[0], -1, -1)  # [B, C, C]
        return x.baddbmm_(pointwise, hidden).add_(self.bias[:, None])


def replace_layers(vocoder: Qwen3OmniMoeCode2Wav) -> None:
    """Puts the layers of this file in the place of those that they equal."""
    for parent in list(vocoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3OmniMoeCode2WavDecoderResidualUnit):
                setattr(parent, name, ResidualUnit(child))
            elif isinstance(child, Qwen3OmniMoeSnakeBeta):
                setattr(parent, name, SnakeBeta(child))
