# SPDX-License-Identifier: Apache-2.0
"""The small transformer that predicts the residual codes of one frame of speech from its first code.

It runs once for each frame of each request, inside the talker's step: the hottest loop of the pipeline. All requests of
a step run as one batch; on a GPU a whole frame is one CUDA graph.

Reference: `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` of HF transformers.
This file knows no request, no talker and no engine.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig

from vllm_omni.model_executor.models.qwen3_omni_moe.code_predictor_layers import (
    CodePredictorLayer,
    LayerCache,
    LayerKernels,
    empty_weight,
    rms_norm,
)
from vllm_omni.model_executor.models.qwen3_omni_moe.residual_frames import (
    SAMPLING_TOP_K,
    Frame,
    FrameGraphs,
    MakeFrame,
    ResidualSampling,
)


def _refuse_unknown_attention(config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
    rope: Any = config.rope_parameters
    if config.attention_bias or "sliding_attention" in (config.layer_types or ()) or rope["rope_type"] != "default":
        raise ValueError("the code predictor supports no attention biases, no sliding windows and no scaled rotations")


class CodePredictor(nn.Module):
    """Predicts the residual codes of one frame for a batch of requests."""

    def __init__(
        self, config: Qwen3OmniMoeTalkerCodePredictorConfig, max_batch_size: int, use_graphs: bool = False
    ) -> None:
        """
        Args:
            config: The checkpoint's `code_predictor_config`.
            max_batch_size: The most requests of one call.
            use_graphs: Run frames as CUDA graphs; the weights must be on a CUDA device.

        Raises:
            ValueError: The configuration has a kind of attention that no published checkpoint uses.
        """
        super().__init__()
        _refuse_unknown_attention(config)
        self.config = config
        self.max_batch_size = max_batch_size
        self.use_graphs = use_graphs
        self.num_steps = config.num_code_groups - 1
        self.layers = nn.ModuleList(CodePredictorLayer(config, max_batch_size) for _ in range(config.num_hidden_layers))
        self.norm = empty_weight(config.hidden_size)
        self.codec_embedding = empty_weight(self.num_steps, config.vocab_size, config.hidden_size)
        self.lm_head = empty_weight(self.num_steps, config.vocab_size, config.hidden_size)
        self._make_frame: MakeFrame | None = None

    def forward(
        self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None = None
    ) -> Frame:
        """
        Args:
            hidden: `[B, H]`, the talker's last hidden state (after its final norm).
            first_embeds: `[B, H]`, the talker's embedding of the frame's first code.
            sampling: None takes the likeliest codes.
        """
        if self._make_frame is None:
            # At the first frame, because with dummy weights vLLM does not call `load_weights`.
            self._make_frame = FrameKernels(self)
            if self.use_graphs:
                noise_shape = (self.num_steps, SAMPLING_TOP_K)
                self._make_frame = FrameGraphs(self._make_frame, self.max_batch_size, self.norm.data, noise_shape)
        return self._make_frame(hidden, first_embeds, sampling)

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """`[N, num_code_groups - 1]` residual codes -> `[N, H]`, the sum of their embeddings."""
        embeds = torch.zeros(codes.shape[0], self.config.hidden_size, dtype=self.norm.dtype, device=codes.device)
        for step in range(self.num_steps):  # in the order of `forward`, so that the sums are equal bit by bit
            embeds = embeds + F.embedding(codes[:, step], self.codec_embedding[step])
        return embeds

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the names below `talker.code_predictor.` and returns the loaded parameters."""
        loaded = set()
        for name, tensor in weights:
            target, view = self._locate(name)
            view.data.copy_(tensor)
            loaded.add(target)
        self._make_frame = None
        return loaded

    def _locate(self, name: str) -> tuple[str, torch.Tensor]:
        """The parameter of a checkpoint name, and the part of it."""
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
        inter = layer.down_proj.shape[1]
        projections = {
            "q_proj": ("qkv_proj", slice(0, q_size)),
            "k_proj": ("qkv_proj", slice(q_size, q_size + kv_size)),
            "v_proj": ("qkv_proj", slice(q_size + kv_size, None)),
            "o_proj": ("o_proj", slice(None)),
            "gate_proj": ("gate_up_proj", slice(0, inter)),
            "up_proj": ("gate_up_proj", slice(inter, None)),
            "down_proj": ("down_proj", slice(None)),
        }
        return projections.get(name, (name, slice(None)))


class FrameKernels:
    """The loop over the codes of a frame, with loaded weights."""

    def __init__(self, predictor: CodePredictor) -> None:
        config = predictor.config
        layers = cast(list[CodePredictorLayer], list(predictor.layers))
        norms = [layer.input_layernorm.data for layer in layers] + [predictor.norm.data]
        self._first_norm, self._eps = norms[0], config.rms_norm_eps
        self._layers = [LayerKernels(layer, norm) for layer, norm in zip(layers, norms[1:], strict=True)]
        self._embeddings = predictor.codec_embedding.data.unbind(0)
        self._heads = [head.t() for head in predictor.lm_head.data.unbind(0)]
        self._num_steps = predictor.num_steps
        self._cos_sin = _rotation_table(config, predictor.norm.data)
        self._passes: dict[int, list[FramePass]] = {}

    def __call__(self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None) -> Frame:
        """As `CodePredictor.forward`."""
        batch_size = hidden.shape[0]
        passes = self._passes.get(batch_size) or self._make_passes(batch_size)
        rows = torch.stack((hidden, first_embeds), dim=1).view(-1, hidden.shape[1])  # [2 * B, H]
        last = self._forward_rows(rows, passes[0])[1::2]
        codes, embeds = [], torch.zeros_like(first_embeds)
        for step in range(self._num_steps):
            logits = torch.mm(last, self._heads[step])
            code = logits.argmax(-1) if sampling is None else sampling.sample(logits, step)
            row = F.embedding(code, self._embeddings[step])
            embeds += row
            codes.append(code)
            if step + 1 < self._num_steps:
                last = self._forward_rows(row, passes[step + 1])
        return Frame(torch.stack(codes, dim=1), embeds)

    def _forward_rows(self, rows: torch.Tensor, frame_pass: "FramePass") -> torch.Tensor:
        """`[N, H]` -> `[N, H]` after the final norm. Overwrites `rows`."""
        hidden = rms_norm(rows, self._first_norm, self._eps)
        for layer, cache in zip(self._layers, frame_pass.caches, strict=True):
            hidden = layer(hidden, rows, frame_pass.positions, self._cos_sin, cache)
        return hidden

    def _make_passes(self, batch_size: int) -> "list[FramePass]":
        """The first pass computes two rows of each frame, every other pass one."""
        spans = [(0, 2), *((start, 1) for start in range(2, self._num_steps + 1))]
        self._passes[batch_size] = [
            FramePass(
                torch.arange(start, start + num_rows, device=self._cos_sin.device).repeat(batch_size),
                [layer.cache_views(batch_size, start, num_rows) for layer in self._layers],
            )
            for start, num_rows in spans
        ]
        return self._passes[batch_size]


class FramePass(NamedTuple):
    """One run through all layers, of the same rows of each of `B` frames.

    Attributes:
        positions: `[B * num_rows]` int64.
        caches: For each layer.
    """

    positions: torch.Tensor
    caches: list[LayerCache]


def _rotation_table(config: Qwen3OmniMoeTalkerCodePredictorConfig, like: torch.Tensor) -> torch.Tensor:
    """`[num_code_groups, head_dim]`: cosines, then sines, in the dtype and on the device of `like`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=like.device) / config.head_dim
    rope: Any = config.rope_parameters
    inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
    angles = torch.arange(config.num_code_groups, dtype=torch.float32, device=like.device)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), -1).to(like.dtype)
