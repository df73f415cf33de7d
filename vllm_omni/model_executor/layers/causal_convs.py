# SPDX-License-Identifier: Apache-2.0
"""Convolutions of causal codecs with state: each starts from its last inputs of the window before (see `causal_state`).

Each takes the parameters of the layer that it replaces, under the same name, `conv`, and computes the same.
"""

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.causal_state import LayerStates


class StatefulConv(nn.Module):
    """A convolution whose state is its last `num_kept` inputs."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d, num_kept: int) -> None:
        super().__init__()
        self.conv = conv
        self.num_kept = num_kept
        self.state_size = conv.in_channels * num_kept

    def take(self, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept]`, what comes before the inputs."""
        return states.take(self.conv.in_channels, self.num_kept)

    def extend(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, L]` -> `[B, C', L']`: takes the state, and runs."""
        return self(torch.cat((self.take(states), x), dim=-1) if self.num_kept else x, states)


class CausalConv(StatefulConv):
    """A causal convolution of stride 1; its state is its last `(kernel - 1) * dilation` inputs."""

    def __init__(self, conv: nn.Conv1d) -> None:
        """
        Args:
            conv: Without padding of its own.
        """
        assert conv.stride == (1,) and conv.padding == (0,)
        super().__init__(conv, (conv.kernel_size[0] - 1) * conv.dilation[0])

    def forward(self, whole: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept + L]` -> `[B, C', L]`"""
        states.keep(whole, self.num_kept)
        return self.conv(whole)


class TransposedConv(StatefulConv):
    """A transposed convolution whose kernel is its stride, or twice that: then its state is one input.

    With kernel `2 * rate` each position gives `rate` samples, computed from it and the position before. Some models
    drop those of a request's first position. As a convolution of kernel 2 with `rate` outputs for each channel it takes
    half the time.
    """

    def __init__(self, conv: nn.ConvTranspose1d, drops_first: bool = False) -> None:
        """
        Args:
            conv: Of one group, or depthwise.
            drops_first: The layer cuts `rate` samples off both ends; otherwise off the right end only.
        """
        self.rate = conv.stride[0]
        super().__init__(conv, conv.kernel_size[0] // self.rate - 1)
        assert conv.kernel_size[0] == self.rate * (self.num_kept + 1) and self.num_kept <= 1
        assert conv.groups == 1 or conv.groups == conv.in_channels == conv.out_channels
        self.drops_first = drops_first and self.num_kept > 0

    def forward(self, whole: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept + L]` -> `[B, C', at most rate * L]`"""
        states.keep(whole, self.num_kept)
        channels, rate, taps, groups = self.conv.out_channels, self.rate, self.num_kept + 1, self.conv.groups
        weight = self.conv.weight.unflatten(2, (taps, rate)).flip(2)  # [C, C' / groups, taps, rate]
        if groups == 1:
            weight = weight.permute(1, 3, 0, 2).reshape(channels * rate, -1, taps)
        else:
            weight = weight.permute(0, 3, 1, 2).reshape(channels * rate, 1, taps)
        bias = None if self.conv.bias is None else self.conv.bias.repeat_interleave(rate)
        wave = functional.conv1d(whole, weight, bias, groups=groups)  # [B, C' * rate, L]
        wave = wave.unflatten(1, (channels, rate)).transpose(2, 3).flatten(2)
        states.grow(rate)
        return states.drop_beginning(wave, rate) if self.drops_first else wave
