# SPDX-License-Identifier: Apache-2.0
"""One layer of a depth decoder: its weights, and its few kernels for one pass of a frame.

A frame is a new sequence of at most `num_codes` rows, so keys and values are in static buffers without a paged
cache. A pass's views of these buffers are made once for each batch size. This file knows no sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from vllm import _custom_ops as ops

MIN_PACKED_SIZE = 128 * 1024
"""Elements of a weight from which on packing is faster, although the call costs more."""

Projection = Callable[[torch.Tensor], torch.Tensor]


def empty_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """vLLM's kernel, many times cheaper to launch than torch's on a CPU. `x` must be contiguous."""
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, eps)
    return out


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """`[N, 2 * D]` gate and up -> `[N, D]`."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _as_projection(weight: torch.Tensor) -> Projection:
    """`[N, in]` -> `[N, out]`. On a CPU a large weight is packed, which is faster."""
    if weight.device.type == "cpu" and ops._supports_onednn and weight.numel() >= MIN_PACKED_SIZE:
        handler = ops.create_onednn_mm(weight.t())
        return lambda x: ops.onednn_mm(handler, x, None)
    transposed = weight.t()
    return lambda x: torch.mm(x, transposed)


class DepthDecoderLayer(nn.Module):
    """The weights of one layer, projections of the same input fused."""

    def __init__(self, config: PretrainedConfig, num_codes: int, max_batch_size: int, has_qk_norm: bool) -> None:
        """Takes the arguments of `DepthDecoder`."""
        super().__init__()
        hidden, inter = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_qk_heads = self.num_heads + self.num_kv_heads
        self.eps = config.rms_norm_eps
        self.input_layernorm = empty_weight(hidden)
        self.qkv_proj = empty_weight((self.num_qk_heads + self.num_kv_heads) * self.head_dim, hidden)
        self.has_qk_norm = has_qk_norm
        if has_qk_norm:
            self.q_norm = empty_weight(self.head_dim)
            self.k_norm = empty_weight(self.head_dim)
        self.o_proj = empty_weight(hidden, self.num_heads * self.head_dim)
        self.post_attention_layernorm = empty_weight(hidden)
        self.gate_up_proj = empty_weight(2 * inter, hidden)
        self.down_proj = empty_weight(hidden, inter)
        cache_shape = (max_batch_size, self.num_kv_heads, num_codes, self.head_dim)
        self.k_cache: torch.Tensor
        self.v_cache: torch.Tensor
        self.register_buffer("k_cache", torch.zeros(cache_shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(cache_shape), persistent=False)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The views of a layer's cache for one pass of `B` frames, rows `[start, start + num_rows)` of each.

    Attributes:
        new_keys, new_values: `[B, kv_heads, num_rows, head_dim]`.
        keys, values: `[B, kv_heads, start + num_rows, head_dim]`.
    """

    new_keys: torch.Tensor
    new_values: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class LayerKernels:
    """Runs a layer with loaded weights. No module: its call would cost more than most of these kernels."""

    def __init__(self, layer: DepthDecoderLayer, next_norm: torch.Tensor) -> None:
        """
        Args:
            next_norm: The norm that follows the layer: that of the next one, or the final one.
        """
        self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj = (
            _as_projection(weight.data)
            for weight in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        )
        self.qk_norm: torch.Tensor | None = None
        if layer.has_qk_norm:
            norms = (layer.q_norm.expand(layer.num_heads, -1), layer.k_norm.expand(layer.num_kv_heads, -1))
            self.qk_norm = torch.cat(norms).clone()  # [heads + kv_heads, head_dim]: one product for queries and keys
        self.mlp_norm, self.next_norm = layer.post_attention_layernorm.data, next_norm
        self.k_cache, self.v_cache, self.eps = layer.k_cache, layer.v_cache, layer.eps
        self.num_heads, self.num_kv_heads, self.num_qk_heads = layer.num_heads, layer.num_kv_heads, layer.num_qk_heads
        self.head_dim = layer.head_dim
        self.enable_gqa = layer.num_heads != layer.num_kv_heads

    def cache_views(self, batch_size: int, start: int, num_rows: int) -> LayerCache:
        end = start + num_rows
        keys, values = self.k_cache[:batch_size, :, :end], self.v_cache[:batch_size, :, :end]
        return LayerCache(keys[:, :, start:], values[:, :, start:], keys, values)

    def __call__(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """
        Args:
            normed: `[N, hidden]`, after this layer's first norm.
            residual: `[N, hidden]`, changed in place.
            positions: `[N]` int64.
            cos_sin: `[num_codes, head_dim]`, vLLM's rotation table.

        Returns:
            `[N, hidden]`, after the norm that follows this layer.
        """
        hidden = self.o_proj(self._attend(self.qkv_proj(normed), positions, cos_sin, cache))
        ops.fused_add_rms_norm(hidden, residual, self.mlp_norm, self.eps)
        hidden = self.down_proj(_swiglu(self.gate_up_proj(hidden)))
        ops.fused_add_rms_norm(hidden, residual, self.next_norm, self.eps)
        return hidden

    def _attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """`[N, (heads + 2 * kv_heads) * head_dim]` -> `[N, heads * head_dim]`."""
        batch_size, _, num_rows, _ = cache.new_keys.shape
        qkv = qkv.view(-1, self.num_qk_heads + self.num_kv_heads, self.head_dim)
        if self.qk_norm is None:
            qk = qkv[:, : self.num_qk_heads].contiguous()
        else:
            qk = rms_norm(qkv, None, self.eps)[:, : self.num_qk_heads] * self.qk_norm
        ops.rotary_embedding(positions, qk.view(qk.shape[0], -1), None, self.head_dim, cos_sin, True)
        if num_rows == 1:
            cache.new_keys.copy_(qk[:, self.num_heads :, None])
            cache.new_values.copy_(qkv[:, self.num_qk_heads :, None])
            # The heads that share keys and values take the dimension of a sequence's queries.
            queries = qk[:, : self.num_heads].view(batch_size, self.num_kv_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(queries, cache.keys, cache.values).reshape(batch_size, -1)
        qk = qk.view(batch_size, num_rows, self.num_qk_heads, self.head_dim).transpose(1, 2)
        values = qkv[:, self.num_qk_heads :].view(batch_size, num_rows, self.num_kv_heads, self.head_dim)
        cache.new_keys.copy_(qk[:, self.num_heads :])
        cache.new_values.copy_(values.transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            qk[:, : self.num_heads], cache.keys, cache.values, is_causal=True, enable_gqa=self.enable_gqa
        )
        return attended.transpose(1, 2).reshape(batch_size * num_rows, -1)
