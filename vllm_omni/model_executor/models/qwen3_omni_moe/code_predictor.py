# SPDX-License-Identifier: Apache-2.0
"""The small transformer that adds the residual codes of one frame of speech to its first code.

It runs once for each frame of each request, inside the talker's step, so it is the hottest loop of the
pipeline. All requests of a step run as one batch; a frame is a fresh sequence of at most
`num_code_groups` rows, so its keys and values live in static buffers and need no paged cache.

Reference: `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` of HF transformers.
This file knows no request, no talker and no engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig
from vllm import _custom_ops as ops

SAMPLING_TOP_K = 50
"""Residual codes are drawn from the 50 likeliest (the reference fixes it, whatever the talker's own top_k)."""

SAMPLING_TOP_P = 0.8
"""Nucleus of the residual codes, fixed by the reference as well."""

MIN_PACKED_SIZE = 128 * 1024
"""Elements of a weight from which on packing it pays for the call that then costs more."""


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


class FrameRows(NamedTuple):
    """Which rows of each frame one pass computes: `[start, start + num_rows)`, of all requests.

    Attributes:
        positions: `[B * num_rows]` int64.
        cos_sin: `[num_code_groups, head_dim]`, vLLM's rotation table.
    """

    start: int
    num_rows: int
    positions: torch.Tensor
    cos_sin: torch.Tensor


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """vLLM's kernel, many times cheaper to launch than torch's on a CPU. `x` must be contiguous."""
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, eps)
    return out


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """`[N, 2 * D]` gate and up -> `[N, D]`."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


class PackedLinear(nn.Module):
    """A projection without bias. On a CPU a large one runs from a packed copy of its weight, which is quicker."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = _weight(out_features, in_features)
        self._packed: ops.CPUDNNLGEMMHandler | None = None

    def pack(self) -> None:
        """Call once the weight is loaded."""
        if self.weight.device.type == "cpu" and ops._supports_onednn and self.weight.numel() >= MIN_PACKED_SIZE:
            self._packed = ops.create_onednn_mm(self.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in]` -> `[N, out]`."""
        return F.linear(x, self.weight) if self._packed is None else ops.onednn_mm(self._packed, x, None)


class CodePredictorLayer(nn.Module):
    """One decoder layer with fused projections and a static key-value cache."""

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, max_batch_size: int) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_qk_heads = self.num_heads + self.num_kv_heads
        self.enable_gqa = self.num_heads != self.num_kv_heads
        self.eps = config.rms_norm_eps
        self.input_layernorm = _weight(hidden)
        self.qkv_proj = PackedLinear(hidden, (self.num_qk_heads + self.num_kv_heads) * self.head_dim)
        self.q_norm = _weight(self.head_dim)
        self.k_norm = _weight(self.head_dim)
        self.o_proj = PackedLinear(self.num_heads * self.head_dim, hidden)
        self.post_attention_layernorm = _weight(hidden)
        self.gate_up_proj = PackedLinear(hidden, 2 * inter)
        self.down_proj = PackedLinear(inter, hidden)
        cache_shape = (max_batch_size, self.num_kv_heads, config.num_code_groups, self.head_dim)
        self.k_cache: torch.Tensor
        self.v_cache: torch.Tensor
        self.register_buffer("k_cache", torch.zeros(cache_shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(cache_shape), persistent=False)

    def finish_loading(self) -> None:
        """Packs the projections, and lays the norms' weights out by head: one product serves queries and keys."""
        for projection in (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj):
            projection.pack()
        weights = (self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1))
        self.qk_norm = torch.cat(weights).clone()  # [heads + kv_heads, head_dim]

    def forward(self, hidden: torch.Tensor, rows: FrameRows) -> torch.Tensor:
        """`[B * rows.num_rows, H]` -> the same shape, before the final norm."""
        normed = _rms_norm(hidden, self.input_layernorm, self.eps)
        hidden = hidden + self.o_proj(self._attend(self.qkv_proj(normed), rows))
        normed = _rms_norm(hidden, self.post_attention_layernorm, self.eps)
        return hidden + self.down_proj(_swiglu(self.gate_up_proj(normed)))

    def _attend(self, qkv: torch.Tensor, rows: FrameRows) -> torch.Tensor:
        """`[B * num_rows, (heads + 2 * kv_heads) * head_dim]` -> `[B * num_rows, heads * head_dim]`."""
        start, num_rows = rows.start, rows.num_rows
        qkv = qkv.view(-1, self.num_qk_heads + self.num_kv_heads, self.head_dim)
        qk = _rms_norm(qkv, None, self.eps)[:, : self.num_qk_heads] * self.qk_norm
        ops.rotary_embedding(rows.positions, qk.view(qk.shape[0], -1), None, self.head_dim, rows.cos_sin, True)
        batch_size, end = qkv.shape[0] // num_rows, start + num_rows
        qk = qk.view(batch_size, num_rows, self.num_qk_heads, self.head_dim).transpose(1, 2)
        values = qkv[:, self.num_qk_heads :].view(batch_size, num_rows, self.num_kv_heads, self.head_dim)
        self.k_cache[:batch_size, :, start:end] = qk[:, self.num_heads :]
        self.v_cache[:batch_size, :, start:end] = values.transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            qk[:, : self.num_heads],
            self.k_cache[:batch_size, :, :end],
            self.v_cache[:batch_size, :, :end],
            is_causal=num_rows > 1,
            enable_gqa=self.enable_gqa,
        )
        return attended.transpose(1, 2).reshape(batch_size * num_rows, -1)


def _refuse_unknown_attention(config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
    rope: Any = config.rope_parameters
    if config.attention_bias or "sliding_attention" in (config.layer_types or ()) or rope["rope_type"] != "default":
        raise ValueError("the code predictor supports no attention biases, no sliding windows and no scaled rotations")


class CodePredictor(nn.Module):
    """Predicts the residual codes of one frame for a batch of requests."""

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, max_batch_size: int) -> None:
        """
        Args:
            config: The checkpoint's `code_predictor_config`.
            max_batch_size: The most requests that one call can hold.

        Raises:
            ValueError: The configuration asks for attention that no published checkpoint uses.
        """
        super().__init__()
        _refuse_unknown_attention(config)
        self.config = config
        self.num_steps = config.num_code_groups - 1
        self.layers = nn.ModuleList(CodePredictorLayer(config, max_batch_size) for _ in range(config.num_hidden_layers))
        self.norm = _weight(config.hidden_size)
        self.codec_embedding = _weight(self.num_steps, config.vocab_size, config.hidden_size)
        self.lm_head = _weight(self.num_steps, config.vocab_size, config.hidden_size)
        self._cos_sin: torch.Tensor | None = None
        positions = torch.arange(config.num_code_groups)
        self.first_positions: torch.Tensor
        self.positions: torch.Tensor
        self.register_buffer("first_positions", positions[:2].repeat(max_batch_size), persistent=False)
        self.register_buffer("positions", positions[:, None].repeat(1, max_batch_size), persistent=False)

    def forward(
        self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None = None
    ) -> Frame:
        """
        Args:
            hidden: `[B, H]`, the talker's last hidden state (after its final norm).
            first_embeds: `[B, H]`, the talker's embedding of the frame's first code.
            sampling: How to draw; None takes the likeliest code everywhere.
        """
        if self._cos_sin is None:
            self._finish_loading()
        rows = torch.stack((hidden, first_embeds), dim=1).view(-1, hidden.shape[1])  # [2 * B, H]
        last = self._forward_rows(rows, 0, 2)[1::2].contiguous()
        codes, embeds = [], torch.zeros_like(first_embeds)
        for step in range(self.num_steps):
            logits = self.compute_logits(last, step)
            code = logits.argmax(-1) if sampling is None else sampling.sample(logits, step)
            row = F.embedding(code, self.codec_embedding[step])
            embeds = embeds + row
            codes.append(code)
            if step + 1 < self.num_steps:
                last = self._forward_rows(row, step + 2, 1)
        return Frame(torch.stack(codes, dim=1), embeds)

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """`[N, num_code_groups - 1]` residual codes -> `[N, H]`, the sum of their embeddings."""
        embeds = torch.zeros(codes.shape[0], self.config.hidden_size, dtype=self.norm.dtype, device=codes.device)
        for step in range(self.num_steps):  # in the order of `forward`, so that the sums are equal bit by bit
            embeds = embeds + F.embedding(codes[:, step], self.codec_embedding[step])
        return embeds

    def compute_logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """`[B, H]` before the final norm -> `[B, vocab]`, the logits of residual code `step`."""
        return F.linear(_rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.lm_head[step])

    def _forward_rows(self, hidden: torch.Tensor, start: int, num_rows: int) -> torch.Tensor:
        positions = self.first_positions if num_rows > 1 else self.positions[start]
        assert self._cos_sin is not None
        rows = FrameRows(start, num_rows, positions[: hidden.shape[0]], self._cos_sin)
        for layer in self.layers:
            hidden = layer(hidden, rows)
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the names below `talker.code_predictor.` and returns the parameters that it filled."""
        loaded = set()
        for name, tensor in weights:
            target, view = self._locate(name)
            view.data.copy_(tensor)
            loaded.add(target)
        self._cos_sin = None
        return loaded

    def _finish_loading(self) -> None:
        """At the first frame, because vLLM fills weights itself where it is told to load dummies."""
        self._cos_sin = self._rotation_table()
        for layer in self.layers:
            cast(CodePredictorLayer, layer).finish_loading()

    def _locate(self, name: str) -> tuple[str, torch.Tensor]:
        """The parameter that a checkpoint name fills, and the part of it."""
        path = name.removeprefix("model.").removesuffix(".weight").split(".")
        if path[0] != "layers":  # norm, codec_embedding.{step}, lm_head.{step}
            whole = getattr(self, path[0])
            return path[0], whole[int(path[1])] if len(path) > 1 else whole
        layer = cast(CodePredictorLayer, self.layers[int(path[1])])
        target, rows = self._locate_in_layer(layer, path[-1])
        return f"layers.{path[1]}.{target}", layer.get_parameter(target)[rows]

    @staticmethod
    def _locate_in_layer(layer: CodePredictorLayer, name: str) -> tuple[str, slice]:
        q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        inter = layer.down_proj.weight.shape[1]
        projections = {
            "q_proj": ("qkv_proj.weight", slice(0, q_size)),
            "k_proj": ("qkv_proj.weight", slice(q_size, q_size + kv_size)),
            "v_proj": ("qkv_proj.weight", slice(q_size + kv_size, None)),
            "o_proj": ("o_proj.weight", slice(None)),
            "gate_proj": ("gate_up_proj.weight", slice(0, inter)),
            "up_proj": ("gate_up_proj.weight", slice(inter, None)),
            "down_proj": ("down_proj.weight", slice(None)),
        }
        return projections.get(name, (name, slice(None)))

    def _rotation_table(self) -> torch.Tensor:
        """`[num_code_groups, head_dim]`: cosines, then sines, in the weights' dtype."""
        config, device = self.config, self.norm.device
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        rope: Any = config.rope_parameters
        inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
        angles = torch.arange(config.num_code_groups, dtype=torch.float32, device=device)[:, None] * inv_freq
        return torch.cat((angles.cos(), angles.sin()), -1).to(self.norm.dtype)
