# SPDX-License-Identifier: Apache-2.0
"""The vocoder of Qwen's speech models with state: each layer starts from its state after the window before.

They also make fewer passes over their activations, which are far larger than any cache. Each takes the parameters of
the HF transformers layer that it replaces, under the same names, and computes the same. See `causal_state`.
"""

import math
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

from vllm_omni.model_executor.layers.causal_convs import CausalConv, StatefulConv, TransposedConv
from vllm_omni.model_executor.layers.causal_state import LayerStates, StateKeys
from vllm_omni.model_executor.layers.causal_vocoder import CausalVocoder


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


class ResidualUnit(nn.Module):
    """Activation, dilated causal convolution, activation, pointwise convolution, and the sum with its input."""

    def __init__(self, unit: Qwen3OmniMoeCode2WavDecoderResidualUnit) -> None:
        super().__init__()
        self.act1 = SnakeBeta(unit.act1)
        self.conv1 = CausalConv(unit.conv1.conv)
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
        self.dwconv = CausalConv(block.dwconv.conv)
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

    def __init__(self, layer: Qwen3OmniMoeCode2WavDecoderBlock, drops_first: bool) -> None:
        super().__init__()
        hf_layers: Any = layer.block  # nn.ModuleList hides their classes
        activation, transposed, *units = hf_layers
        self.block = nn.ModuleList(
            [
                SnakeBeta(activation),
                TransposedConv(transposed.conv, drops_first),
                *(ResidualUnit(unit) for unit in units),
            ]
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
    """HF transformers' vocoder, of which it takes the parameters, for batches of windows.

    Attributes:
        hop: Samples of a frame.
    """

    def __init__(self, vocoder: Qwen3OmniMoeCode2Wav, drops_first: bool) -> None:
        """
        Args:
            drops_first: The transposed convolutions cut off as many samples on the left as on the right; otherwise on
                the right only.
        """
        super().__init__()
        self.config = vocoder.pre_transformer.config
        self.hop = math.prod((*self.config.upsample_rates, *self.config.upsampling_ratios))
        self.pre_transformer = vocoder.pre_transformer
        self.code_embedding = vocoder.code_embedding
        self.code_offset = nn.Buffer(vocoder.code_offset, persistent=False)
        hf_upsample: Any = vocoder.upsample
        hf_decoder: Any = vocoder.decoder
        self.upsample = nn.ModuleList(
            nn.ModuleList([TransposedConv(transposed.conv, drops_first), ConvNeXtBlock(block)])
            for transposed, block in hf_upsample
        )
        first, *blocks, activation, last = hf_decoder
        self.decoder = nn.ModuleList(
            [
                CausalConv(first.conv),
                *(DecoderBlock(block, drops_first) for block in blocks),
                SnakeBeta(activation),
                CausalConv(last.conv),
            ]
        )

    @cached_property
    def state_size(self) -> int:
        keys = [layer.self_attn.k_proj.out_features for layer in self.pre_transformer.layers]  # and as many values
        return 2 * sum(keys) * (self.config.sliding_window - 1) + sum(
            layer.state_size for layer in self.modules() if isinstance(layer, StatefulConv)
        )

    def new_state(self) -> torch.Tensor:
        """`[state_size]`, that of a request before its first frame."""
        return self.code_embedding.weight.new_zeros(self.state_size)

    def forward(self, codes: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, num_quantizers, L]` int64 -> `[B, samples]` in [-1, 1], each row's own samples first."""
        x = self.transform(self.code_embedding(codes + self.code_offset), states).transpose(1, 2)
        upsample: Any = self.upsample
        for transposed, block in upsample:
            x = block(transposed.extend(x, states), states)
        decoder: Any = self.decoder
        first, *blocks, activation, last = decoder
        x = first.extend(x, states)
        for block in blocks:
            x = block(x, states)
        wave = last(activation(x, last.take(states)), states)
        return wave[:, 0].clamp(min=-1, max=1)

    def transform(self, embeddings: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, num_quantizers, L, width]`, those of a frame's codes, -> `[B, L, hidden]`"""
        return self.attend(embeddings.mean(1), states)

    def attend(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, L, hidden]` -> the same shape. All layers of the transformer have the same sliding window."""
        keys = StateKeys(states, self.config.sliding_window)
        return self.pre_transformer(
            inputs_embeds=x,
            attention_mask={"sliding_attention": keys.mask(x.device), "full_attention": None},
            position_ids=keys.positions(x.device),
            past_key_values=keys,
        ).last_hidden_state


class Code2Wav(CausalVocoder):
    """The base of vocoders with this network."""

    @property
    def network(self) -> StatefulCode2Wav:
        raise NotImplementedError

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The decoder's last block is the widest: half the channels of the block
        before it, at several times its rate."""
        config = self.network.config
        channels = config.decoder_dim // 2 ** len(config.upsample_rates)
        return self.widest_bytes(num_rows, channels, self.network.code_embedding.weight.dtype)
