# SPDX-License-Identifier: Apache-2.0
"""The vocoder's layers with state: each starts from its state after the window before (see `vocoder_state`).

They also make fewer passes over their activations, which are far larger than any cache. Each takes the parameters of
the HF transformers layer that it replaces, under the same names, and computes the same.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_state import LayerStates, StateKeys


class SnakeBeta(nn.Module):
    """`x + sin(x * exp(alpha))**2 / exp(beta)` for each channel, in four passes and one buffer."""

    def __init__(self, snake: Qwen3OmniMoeSnakeBeta) -> None:
        super().__init__()
        self.alpha = snake.alpha
        self.beta = snake.beta
        self.eps = snake.no_div_by_zero

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, C, L]` -> `[B, C, n + L]` with the n positions of `before`, state of the next layer, in front."""
        batch, channels, length = x.shape
        num_before = 0 if before is None else before.shape[-1]
        whole = x.new_empty(batch, channels, num_before + length)
        if before is not None:
            whole[..., :num_before] = before
        wave = whole[..., num_before:]
        torch.mul(x, self.alpha.exp()[:, None], out=wave)
        wave.sin_().mul_((self.beta.exp() + self.eps).rsqrt()[:, None])
        torch.addcmul(x, wave, wave, out=wave)
        return whole


class StatefulConv(nn.Module):
    """A convolution whose state is its last `num_kept` inputs."""

    def __init__(self, conv: Any, num_kept: int) -> None:
        super().__init__()
        self.conv = conv
        self.num_kept = num_kept
        self.state_size = conv.in_channels * num_kept

    def take(self, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept]`, what comes before the inputs."""
        return states.take(self.conv.in_channels, self.num_kept)


class CausalConv(StatefulConv):
    """A causal convolution of stride 1; its state is its last `(kernel - 1) * dilation` inputs."""

    def __init__(self, layer: Qwen3OmniMoeCausalConvNet) -> None:
        super().__init__(layer.conv, layer.padding)

    def forward(self, whole: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept + L]` -> `[B, C', L]`"""
        states.keep(whole, self.num_kept)
        return self.conv(whole)


class TransposedConv(StatefulConv):
    """A transposed convolution whose kernel is its stride, or twice that: then its state is one input.

    With kernel `2 * rate` each position gives `rate` samples, computed from it and the position before; the reference
    drops those of a request's first position. As a convolution of kernel 2 with `rate` outputs for each channel it
    takes half the time.
    """

    def __init__(self, layer: Qwen3OmniMoeCausalTransConvNet) -> None:
        self.rate = layer.conv.stride[0]
        super().__init__(layer.conv, layer.conv.kernel_size[0] // self.rate - 1)
        assert self.conv.kernel_size[0] == self.rate * (self.num_kept + 1) and self.num_kept <= 1

    def forward(self, whole: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, num_kept + L]` -> `[B, C', at most rate * L]`"""
        states.keep(whole, self.num_kept)
        channels, rate, taps = self.conv.out_channels, self.rate, self.num_kept + 1
        weight = self.conv.weight.unflatten(2, (taps, rate)).flip(2)  # [C, C', taps, rate]
        weight = weight.permute(1, 3, 0, 2).reshape(channels * rate, -1, taps)
        bias = cast(torch.Tensor, self.conv.bias).repeat_interleave(rate)
        wave = functional.conv1d(whole, weight, bias)  # [B, C' * rate, L]
        wave = wave.unflatten(1, (channels, rate)).transpose(2, 3).flatten(2)
        states.grow(rate)
        return states.drop_beginning(wave, rate) if self.num_kept else wave


class ResidualUnit(nn.Module):
    """Activation, dilated causal convolution, activation, pointwise convolution, and the sum with its input."""

    def __init__(self, unit: Qwen3OmniMoeCode2WavDecoderResidualUnit) -> None:
        super().__init__()
        self.act1 = SnakeBeta(unit.act1)
        self.conv1 = CausalConv(unit.conv1)
        self.act2 = SnakeBeta(unit.act2)
        self.conv2 = unit.conv2

    @property
    def bias(self) -> torch.Tensor:
        return cast(torch.Tensor, self.conv2.conv.bias)

    def forward(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, L]` -> the same shape, in the same memory."""
        hidden = self.act2(self.conv1(self.act1(x, self.conv1.take(states)), states))
        pointwise = self.conv2.conv.weight[..., 0].expand(x.shape[0], -1, -1)  # [B, C, C]
        return x.baddbmm_(pointwise, hidden).add_(self.bias[:, None])


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution, norm, and a position-wise network, scaled and added to the input."""

    def __init__(self, block: Qwen3OmniMoeConvNeXtBlock) -> None:
        super().__init__()
        self.dwconv = CausalConv(block.dwconv)
        self.norm = block.norm
        self.pwconv1 = block.pwconv1
        self.act = block.act
        self.pwconv2 = block.pwconv2
        self.gamma = block.gamma

    def forward(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, L]` -> the same shape."""
        hidden = self.dwconv(torch.cat((self.dwconv.take(states), x), dim=-1), states)
        hidden = self.pwconv2(self.act(self.pwconv1(self.norm(hidden.transpose(1, 2)))))
        return torch.addcmul(x, hidden.transpose(1, 2), self.gamma[:, None])


class DecoderBlock(nn.Module):
    """Activation, transposed convolution, and three residual units."""

    def __init__(self, layer: Qwen3OmniMoeCode2WavDecoderBlock) -> None:
        super().__init__()
        hf_layers: Any = layer.block  # nn.ModuleList hides their classes
        activation, transposed, *units = hf_layers
        self.block = nn.ModuleList(
            [SnakeBeta(activation), TransposedConv(transposed), *(ResidualUnit(unit) for unit in units)]
        )

    def forward(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, L]` -> `[B, C / 2, at most rate * L]`"""
        layers: Any = self.block
        activation, transposed, *units = layers
        x = transposed(activation(x, transposed.take(states)), states)
        for unit in units:
            x = unit(x, states)
        return x


class StatefulCode2Wav(nn.Module):
    """HF transformers' vocoder, of which it takes the parameters, for batches of windows."""

    def __init__(self, vocoder: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        self.config = vocoder.config
        self.pre_transformer = vocoder.pre_transformer
        self.code_embedding = vocoder.code_embedding
        self.code_offset = nn.Buffer(vocoder.code_offset, persistent=False)
        hf_upsample: Any = vocoder.upsample
        hf_decoder: Any = vocoder.decoder
        self.upsample = nn.ModuleList(
            nn.ModuleList([TransposedConv(transposed), ConvNeXtBlock(block)]) for transposed, block in hf_upsample
        )
        first, *blocks, activation, last = hf_decoder
        self.decoder = nn.ModuleList(
            [CausalConv(first), *(DecoderBlock(block) for block in blocks), SnakeBeta(activation), CausalConv(last)]
        )
        keys = [layer.self_attn.k_proj.out_features for layer in self.pre_transformer.layers]  # and as many values
        self._state_size = 2 * sum(keys) * (self.config.sliding_window - 1) + sum(
            layer.state_size for layer in self.modules() if isinstance(layer, StatefulConv)
        )

    def new_state(self) -> torch.Tensor:
        """`[state_size]`, that of a request before its first frame."""
        return self.code_embedding.weight.new_zeros(self._state_size)

    def forward(self, codes: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, num_quantizers, L]` int64 -> `[B, samples]` in [-1, 1], each row's own samples first."""
        x = self._transform(self.code_embedding(codes + self.code_offset).mean(1), states).transpose(1, 2)
        upsample: Any = self.upsample
        for transposed, block in upsample:
            x = block(transposed(x, states), states)
        decoder: Any = self.decoder
        first, *blocks, activation, last = decoder
        x = first(torch.cat((first.take(states), x), dim=-1), states)
        for block in blocks:
            x = block(x, states)
        wave = last(activation(x, last.take(states)), states)
        return wave[:, 0].clamp(min=-1, max=1)

    def _transform(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, L, hidden]` -> the same shape. All its layers have the same sliding window."""
        keys = StateKeys(states, self.config.sliding_window)
        return self.pre_transformer(
            inputs_embeds=x,
            attention_mask={"sliding_attention": keys.mask(x.device), "full_attention": None},
            position_ids=keys.positions(x.device),
            past_key_values=keys,
        ).last_hidden_state
