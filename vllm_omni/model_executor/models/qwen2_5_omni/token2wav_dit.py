# SPDX-License-Identifier: Apache-2.0
"""The first half of the vocoder: a diffusion transformer that turns codes into a mel spectrogram.

The parameters and the speaker encoder are HF transformers' own. Here one solution of the differential equation runs for
all requests of a step as one list of blocks, and everything that does not depend on the state is computed once: for a
checkpoint (speakers, modulations of the 28 different times), or for a batch (codes, positions, masks). Equal to
`Qwen2_5OmniToken2WavDiTModel.sample` with its default arguments.

A solution of a request's first run keeps, for each of the 36 evaluations, the keys and values of its last block. The
next run attends to those, with the same result as in one run.

This file knows no engine and no windows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from vllm_omni.model_executor.models.qwen2_5_omni.speakers import Speaker
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_blocks import BlockLayout, BlockRun

NUM_TIME_POINTS = 10
GUIDANCE_SCALE = 0.5
NORM_EPS = 1e-6
"""The reference's; `num_steps` and `guidance_scale` of its `sample`."""

GELU_SCALE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = GELU_SCALE * 0.044715

STAGES = 4
"""Evaluations for each step of the solver (Runge-Kutta, 3/8 rule)."""


@dataclass(frozen=True, slots=True)
class DiTInput:
    """A run of codes of one request.

    Attributes:
        codes: `[T]` int64.
        noise: float32 `[repeats * T, mel_dim]`, the state at time 0.
        speaker: Name in lower case.
        first_block: Blocks of the request before this run.
        past: Kept by the run before this one; None for the first.
        kept_block: The block of this run whose keys and values the next one needs; None for the last.
    """

    codes: torch.Tensor
    noise: torch.Tensor
    speaker: str
    first_block: int = 0
    past: torch.Tensor | None = None
    kept_block: int | None = None

    @property
    def run(self) -> BlockRun:
        return BlockRun(self.noise.shape[0], self.first_block, self.past is not None, self.kept_block)


@dataclass(slots=True)
class Modulation:
    """One layer at one time, each `[hidden]`: `norm(x) * scale + shift`, and gates of the residuals."""

    attn_scale: torch.Tensor
    attn_shift: torch.Tensor
    attn_gate: torch.Tensor
    mlp_scale: torch.Tensor
    mlp_shift: torch.Tensor
    mlp_gate: torch.Tensor


@dataclass(slots=True)
class Batch:
    """The constants of one solution. `2`: with guidance, and without.

    Attributes:
        layout: Of the runs.
        condition: `[2, rows, hidden]`, the projected codes and speakers.
        rotation: complex64 `[2 * blocks, block_size, 1, head_dim / 2]`.
        masks: float32 `[2 * blocks, 1, 1, seen * block_size]`, added to the scores, by blocks back and blocks ahead.
        projected: `[1 + 2 * blocks + 1, block_size, 3, heads, head_dim]`, the queries, keys and values of the current
        layer.
        past: `[evaluations, backward layers, 2, runs with a past, block_size, 2, heads, head_dim]`: keys and values.
    """

    layout: BlockLayout
    condition: torch.Tensor
    rotation: torch.Tensor
    masks: dict[tuple[int, int], torch.Tensor]
    projected: torch.Tensor
    past: torch.Tensor | None


class DiTLayer:
    """One layer of the transformer, its three projections merged."""

    def __init__(self, block: Any) -> None:
        attn = block.attn
        self.neighbourhood = (int(block.look_backward_block), int(block.look_ahead_block))
        self.heads: int = attn.heads
        self.qkv_weight = _merge([attn.to_q.weight, attn.to_k.weight, attn.to_v.weight])
        self.qkv_bias = _merge([attn.to_q.bias, attn.to_k.bias, attn.to_v.bias])
        self.out: nn.Linear = attn.to_out[0]
        self.up: nn.Linear = block.ff.ff[0]
        self.down: nn.Linear = block.ff.ff[3]

    @property
    def looks_back(self) -> bool:
        return self.neighbourhood[0] > 0

    def run(self, x: torch.Tensor, modulation: Modulation, batch: Batch, past: torch.Tensor | None) -> torch.Tensor:
        """Changes `x`, `[2 * rows, hidden]`; returns keys and values, `[2, blocks, block_size, 2, heads, head_dim]`.

        Args:
            past: `[2, runs with a past, block_size, 2, heads, head_dim]`.
        """
        width = x.shape[1:]
        normed = F.layer_norm(x, width, modulation.attn_scale, modulation.attn_shift, NORM_EPS)
        own = batch.projected[1:-1]
        torch.addmm(self.qkv_bias, normed, self.qkv_weight.t(), out=own.view(x.shape[0], -1))
        # Only the first head has rotary positions: pairs of adjacent dimensions are rotated.
        torch.view_as_complex(own[:, :, :2, 0].unflatten(-1, (-1, 2))).mul_(batch.rotation)
        keys = own[:, :, 1:].unflatten(0, (2, -1))
        if past is not None:
            keys[:, batch.layout.past_blocks] = past
        x.addcmul_(self.out(self._attend(batch)), modulation.attn_gate)
        normed = F.layer_norm(x, width, modulation.mlp_scale, modulation.mlp_shift, NORM_EPS)
        x.addcmul_(self.down(gelu(self.up(normed))), modulation.mlp_gate)
        return keys

    def _attend(self, batch: Batch) -> torch.Tensor:
        """`[2 * rows, heads * head_dim]`, from the projected queries, keys and values."""
        projected, (backward, ahead) = batch.projected, self.neighbourhood
        blocks, (frame, part, head, one) = projected.shape[0] - 2, projected.stride()[1:]
        # Adjacent blocks are adjacent in memory: the frames that a block attends to are a view, and views overlap.
        seen = projected[1 - backward :].as_strided(
            (blocks, (backward + 1 + ahead) * projected.shape[1], *projected.shape[2:]),
            (projected.stride(0), frame, part, head, one),
        )
        query = projected[1:-1, :, 0].transpose(1, 2)  # [2 * blocks, heads, block_size, head_dim]
        key, value = (seen[:, :, index].transpose(1, 2) for index in (1, 2))
        mixed = F.scaled_dot_product_attention(query, key, value, batch.masks[self.neighbourhood])
        return mixed.transpose(1, 2).reshape(-1, self.out.in_features)


class DiTSolver:
    """Spectrograms for a batch of runs of codes; made when the weights have been loaded."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, speakers: dict[str, Speaker]) -> None:
        self._dit = cast(Any, dit)
        self.device = self._dit.proj_out.weight.device
        self.block_size: int = self._dit.block_size
        self.layers = [DiTLayer(block) for block in self._dit.transformer_blocks]
        self.num_looking_back = sum(layer.looks_back for layer in self.layers)
        times = self._time_points()
        self._durations: list[float] = times.diff().tolist()
        self._modulations, self._final = self._make_modulations(_stage_times(times))
        config = self._dit.config
        widths = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        self._mel_weight, encoding, code, cond = self._dit.input_embed.proj.weight.detach().split(widths, dim=1)
        self._code_table = F.linear(self._dit.text_embed.codec_embed.weight.detach(), code)
        self._voices = {name: self._encode(speaker, encoding, cond) for name, speaker in speakers.items()}

    def solve(self, inputs: list[DiTInput]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """
        Returns:
            The spectrogram of each input, float32 `[repeats * T, mel_dim]`; and the `past` of the next run for those
            with a `kept_block`: `[36, backward layers, 2, block_size, 2, heads, head_dim]`.
        """
        batch = self._make_batch(inputs)
        kept: list[torch.Tensor] = []
        x = batch.layout.pack([run.noise.to(self.device) for run in inputs])
        for step in range(len(self._durations)):
            x = self._advance(step, x, batch, kept)
        return batch.layout.unpack(x), self._split_kept(kept, inputs)

    def _advance(self, step: int, x: torch.Tensor, batch: Batch, kept: list[torch.Tensor]) -> torch.Tensor:
        """One step of the 3/8 rule."""
        duration = self._durations[step]
        k1 = self._derivative(step, 0, x, batch, kept)
        k2 = self._derivative(step, 1, x.add(k1, alpha=duration / 3), batch, kept)
        k3 = self._derivative(step, 2, x.add(k2, alpha=duration).sub_(k1, alpha=duration / 3), batch, kept)
        k4 = self._derivative(step, 3, x.add((k1 - k2).add_(k3), alpha=duration), batch, kept)
        return x.add(k2.add_(k3).mul_(3).add_(k1).add_(k4), alpha=duration / 8)

    def _derivative(
        self, step: int, stage: int, x: torch.Tensor, batch: Batch, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        """`[rows, mel_dim]` -> the same: the guided velocity of the state `x`."""
        point = (STAGES - 1) * step + stage  # a step ends at the time of the next one's start
        hidden = (batch.condition + F.linear(x, self._mel_weight)).flatten(0, 1)
        past: Iterator[torch.Tensor] = iter(() if batch.past is None else batch.past[STAGES * step + stage])
        for layer, modulation in zip(self.layers, self._modulations[point], strict=True):
            keys = layer.run(hidden, modulation, batch, next(past, None) if layer.looks_back else None)
            if layer.looks_back and batch.layout.kept_blocks.numel():
                kept.append(keys.index_select(1, batch.layout.kept_blocks))
        scale, shift = self._final[point]
        hidden = F.layer_norm(hidden, hidden.shape[1:], scale, shift, NORM_EPS)
        guided, free = hidden.view(2, x.shape[0], -1)
        return self._dit.proj_out(torch.lerp(free, guided, 1 + GUIDANCE_SCALE))

    def _make_batch(self, inputs: list[DiTInput]) -> Batch:
        layout = BlockLayout([run.run for run in inputs], self.block_size, self.device)
        guided = [self._voices[run.speaker][0] + self._embed_codes(run.codes) for run in inputs]
        free = [self._voices[run.speaker][1].expand(run.noise.shape[0], -1) for run in inputs]
        past = [run.past for run in inputs if run.past is not None]
        config = self._dit.config
        projections = 3, config.num_attention_heads, config.head_dim
        return Batch(
            layout=layout,
            condition=torch.stack([layout.pack(guided), layout.pack(free)]),
            rotation=self._make_rotation(layout.positions).unflatten(0, (-1, self.block_size)),
            masks={key: _make_mask(layout.visible(*key)) for key in {layer.neighbourhood for layer in self.layers}},
            projected=self._mel_weight.new_zeros(2 * layout.num_blocks + 2, self.block_size, *projections),
            past=torch.stack(past, dim=3) if past else None,
        )

    def _embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """`[T]` -> `[repeats * T, hidden]`"""
        return self._code_table[codes.to(self.device)].repeat_interleave(self._dit.repeats, dim=0)

    def _make_rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """`[rows]` -> complex64 `[2 * rows, 1, head_dim / 2]`"""
        cos, sin = self._dit.rotary_embed(self._code_table, positions[None])
        half = cos.shape[-1] // 2  # The two halves are equal.
        rotation = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return rotation.repeat(2, 1)[:, None]

    def _split_kept(self, kept: list[torch.Tensor], inputs: list[DiTInput]) -> list[torch.Tensor | None]:
        if not kept:
            return [None] * len(inputs)
        evaluations = STAGES * len(self._durations)
        whole = torch.stack(kept).view(evaluations, self.num_looking_back, *kept[0].shape)
        parts = iter(whole.unbind(3))
        return [None if run.kept_block is None else next(parts).contiguous() for run in inputs]

    def _time_points(self) -> torch.Tensor:
        """`[10]`, denser towards the start."""
        linear = torch.linspace(0, 1, NUM_TIME_POINTS, device=self.device, dtype=torch.float32)  # not vLLM's default
        return linear - (torch.cos(torch.pi / 2 * linear) - 1 + linear)

    def _make_modulations(
        self, times: torch.Tensor
    ) -> tuple[list[list[Modulation]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """What depends on each of `times`: a modulation for each layer, and scale and shift of the last norm."""
        embedded = F.silu(self._dit.time_embed(times))  # [times, hidden]
        layers = [block.attn_norm.linear(embedded).chunk(6, dim=1) for block in self._dit.transformer_blocks]
        scale, shift = self._dit.norm_out.linear(embedded).chunk(2, dim=1)
        points = range(times.shape[0])
        modulations = [[_as_modulation([part[point] for part in parts]) for parts in layers] for point in points]
        return modulations, [(1 + scale[point], shift[point].contiguous()) for point in points]

    def _encode(self, speaker: Speaker, encoding: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """`[2, hidden]`: added to each frame for a speaker, with guidance; and without, which includes code 0."""
        mel = speaker.ref_mel.to(self.device)
        encoded = self._dit.input_embed.spk_encoder(torch.cat([mel, torch.zeros_like(mel)]))  # [2, enc_dim]
        voice = F.linear(encoded, encoding, self._dit.input_embed.proj.bias)
        voice[0] += F.linear(speaker.cond.to(self.device)[0], cond)
        voice[1] += self._code_table[0]
        return voice


def _merge(parts: list[nn.Parameter]) -> torch.Tensor:
    """One tensor of all parts; they become views of it."""
    merged = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, merged.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return merged


def _stage_times(times: torch.Tensor) -> torch.Tensor:
    """`[10]` -> `[28]`: each step's start and its two thirds; and the last step's end."""
    starts, durations = times[:-1], times.diff()
    stages = torch.stack([starts, starts + durations * (1 / 3), starts + durations * (2 / 3)], dim=1)
    return torch.cat([stages.flatten(), times[-1:]])


def _as_modulation(parts: list[torch.Tensor]) -> Modulation:
    """Changes the order of the reference's `Qwen2_5_OmniAdaLayerNormZero` to that of a modulation."""
    attn_shift, attn_scale, attn_gate, mlp_shift, mlp_scale, mlp_gate = (part.contiguous() for part in parts)
    return Modulation(1 + attn_scale, attn_shift, attn_gate, 1 + mlp_scale, mlp_shift, mlp_gate)


def _make_mask(visible: torch.Tensor) -> torch.Tensor:
    """`[blocks, frames]` -> `[2 * blocks, 1, 1, frames]`"""
    mask = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -math.inf)
    return mask.repeat(2, 1)[:, None, None]


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, written as a sigmoid: less than half the time on a CPU."""
    inner = x.square().mul_(GELU_CUBE).add_(GELU_SCALE).mul_(x)
    return inner.sigmoid_().mul_(x)
