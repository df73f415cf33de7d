# SPDX-License-Identifier: Apache-2.0
"""A depth decoder: the small transformer that predicts the residual codes of one frame of speech from its first code.

It runs once for each frame of each request, inside the step of the model that predicts the first codes: the hottest
loop of a pipeline. All requests of a step run as one batch; on a GPU a whole frame is one CUDA graph.

References, in HF transformers: `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`, and
`CsmDepthDecoderForCausalLM`. This file knows no request and no engine.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_omni.model_executor.layers.depth_decoder_layers import (
    DepthDecoderLayer,
    LayerCache,
    LayerKernels,
    empty_weight,
    rms_norm,
)
from vllm_omni.model_executor.layers.residual_codes import MAX_TOP_K, Frame, FrameGraphs, MakeFrame, ResidualSampling


def _refuse_unknown_attention(config: PretrainedConfig) -> None:
    layer_types = getattr(config, "layer_types", None) or ()
    if config.attention_bias or getattr(config, "mlp_bias", False) or "sliding_attention" in layer_types:
        raise ValueError("a depth decoder supports no biases and no sliding windows")


class DepthDecoder(nn.Module):
    """Predicts the residual codes of one frame for a batch of requests.

    A frame is a sequence of its own: the row of the last hidden state, that of the first code, and those of the
    residual codes but the last. Each residual code has an embedding and a head of its own.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_codes: int,
        max_batch_size: int,
        *,
        input_size: int | None = None,
        projection_bias: bool = False,
        has_qk_norm: bool = True,
        use_graphs: bool = False,
    ) -> None:
        """
        Args:
            config: Of the layers, with Llama's fields.
            num_codes: Codes of a frame, the first included.
            max_batch_size: The most requests of one call.
            input_size: Width of rows and embeddings, which a linear layer converts to that of the layers. None: they
                have the width of the layers, and there is no such layer.
            projection_bias: Whether that one has a bias.
            has_qk_norm: Queries and keys are normalized, as in Qwen3.
            use_graphs: Run frames as CUDA graphs; the weights must be on a CUDA device.

        Raises:
            ValueError: The configuration has a kind of attention that no published checkpoint uses.
        """
        super().__init__()
        _refuse_unknown_attention(config)
        self.config = config
        self.num_codes = num_codes
        self.num_steps = num_codes - 1
        self.max_batch_size = max_batch_size
        self.use_graphs = use_graphs
        self.layers = nn.ModuleList(
            DepthDecoderLayer(config, num_codes, max_batch_size, has_qk_norm) for _ in range(config.num_hidden_layers)
        )
        self.norm = empty_weight(config.hidden_size)
        self.codec_embedding = empty_weight(self.num_steps, config.vocab_size, input_size or config.hidden_size)
        self.lm_head = empty_weight(self.num_steps, config.vocab_size, config.hidden_size)
        self.input_projection: nn.Linear | None = None
        if input_size is not None:
            self.input_projection = nn.Linear(input_size, config.hidden_size, bias=projection_bias)
            self.input_projection.requires_grad_(False)
        self._make_frame: MakeFrame | None = None

    def forward(
        self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None = None
    ) -> Frame:
        """
        Args:
            hidden: `[B, input_size]`, the last hidden state (after the final norm) of the calling model.
            first_embeds: `[B, input_size]`, the row of the frame's first code.
            sampling: None takes the likeliest codes.
        """
        if self._make_frame is None:
            # At the first frame, because with dummy weights vLLM does not call `load_weights`.
            self._make_frame = FrameKernels(self)
            if self.use_graphs:
                like = self.codec_embedding.data[0, 0]
                self._make_frame = FrameGraphs(
                    self._make_frame, self.max_batch_size, like, noise_shape=(self.num_steps, MAX_TOP_K)
                )
        return self._make_frame(hidden, first_embeds, sampling)

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """`[N, num_codes - 1]` residual codes -> `[N, input_size]`, the sum of their embeddings."""
        tables = self.codec_embedding
        embeds = torch.zeros(codes.shape[0], tables.shape[-1], dtype=tables.dtype, device=codes.device)
        for step in range(self.num_steps):  # in the order of `forward`, so that the sums are equal bit by bit
            embeds = embeds + F.embedding(codes[:, step], tables[step])
        return embeds

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads weights with Qwen's names: `layers.N. ...`, `norm`, `codec_embedding.STEP`, `lm_head.STEP` (with or
        without `model.` and `.weight`), and `input_projection`. Returns the loaded parameters."""
        loaded = set()
        for name, tensor in weights:
            target, view = self._locate(name)
            view.data.copy_(tensor)
            loaded.add(target)
        self._make_frame = None
        return loaded

    def _locate(self, name: str) -> tuple[str, torch.Tensor]:
        """The parameter of a checkpoint name, and the part of it."""
        if name.startswith("input_projection."):
            return name, self.get_parameter(name)
        path = name.removeprefix("model.").removesuffix(".weight").split(".")
        if path[0] != "layers":  # norm, codec_embedding.{step}, lm_head.{step}
            whole = getattr(self, path[0])
            return path[0], whole[int(path[1])] if len(path) > 1 else whole
        layer = cast(DepthDecoderLayer, self.layers[int(path[1])])
        target, rows = self._locate_in_layer(layer, path[-1])
        return f"layers.{path[1]}.{target}", layer.get_parameter(target)[rows]

    @staticmethod
    def _locate_in_layer(layer: DepthDecoderLayer, name: str) -> tuple[str, slice]:
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

    def __init__(self, decoder: DepthDecoder) -> None:
        config = decoder.config
        layers = cast(list[DepthDecoderLayer], list(decoder.layers))
        norms = [layer.input_layernorm.data for layer in layers] + [decoder.norm.data]
        self._first_norm, self._eps = norms[0], config.rms_norm_eps
        self._layers = [LayerKernels(layer, norm) for layer, norm in zip(layers, norms[1:], strict=True)]
        self._embeddings = decoder.codec_embedding.data.unbind(0)
        self._heads = [head.t() for head in decoder.lm_head.data.unbind(0)]
        self._num_steps = decoder.num_steps
        self._cos_sin = _rotation_table(config, decoder.num_codes, decoder.norm.data)
        self._projection = decoder.input_projection
        self._passes: dict[int, list[FramePass]] = {}

    def __call__(self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None) -> Frame:
        """Predicts the residual codes; see `DepthDecoder.forward`."""
        batch_size = hidden.shape[0]
        passes = self._passes.get(batch_size) or self._make_passes(batch_size)
        rows = torch.stack((hidden, first_embeds), dim=1).view(-1, hidden.shape[1])  # [2 * B, input_size]
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
        """`[N, input_size]` -> `[N, hidden]` after the final norm. May overwrite `rows`."""
        if self._projection is not None:
            rows = self._projection(rows)
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


def _rotation_table(config: PretrainedConfig, num_codes: int, like: torch.Tensor) -> torch.Tensor:
    """`[num_codes, head_dim]`: cosines, then sines, in the dtype and on the device of `like`."""
    rope: Any = config.rope_parameters
    scaling = 1.0
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=like.device) / config.head_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, like.device)
    angles = torch.arange(num_codes, dtype=torch.float32, device=like.device)[:, None] * inv_freq
    return (scaling * torch.cat((angles.cos(), angles.sin()), -1)).to(like.dtype)
