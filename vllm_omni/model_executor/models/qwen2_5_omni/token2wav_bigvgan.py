# SPDX-License-Identifier: Apache-2.0
"""The second half of the vocoder: BigVGAN, which turns mel spectrograms into waveforms.

The parameters are HF transformers' own. What is ours is that many spectrograms run as one: they lie one after the other
in time, with gaps between them that are as wide as any convolution reaches. Gaps are silent (zero) wherever a
convolution looks into them, and each signal goes on as its last sample where an activation looks beyond its ends, so
that every waveform equals that of its spectrogram alone.

This file knows no codes and no windows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

FILTER_REACH = 6
"""Samples at the double rate that an activation looks beyond the ends of its signal."""


@dataclass(frozen=True)
class Timeline:
    """Signals one after the other, at some rate.

    Attributes:
        lengths: Samples of each signal.
        gap: Samples before the first, between any two, and after the last signal.
        device: Where the tensors go that this makes.
    """

    lengths: tuple[int, ...]
    gap: int
    device: torch.device

    def at_rate(self, rate: int) -> "Timeline":
        return Timeline(tuple(rate * length for length in self.lengths), rate * self.gap, self.device)

    @cached_property
    def starts(self) -> list[int]:
        return [self.gap * (index + 1) + sum(self.lengths[:index]) for index in range(len(self.lengths))]

    @cached_property
    def stops(self) -> list[int]:
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @cached_property
    def num_samples(self) -> int:
        return self.stops[-1] + self.gap

    @cached_property
    def gaps(self) -> list[slice]:
        return [slice(start, stop) for start, stop in zip([0, *self.stops], [*self.starts, None], strict=True)]

    def silence(self, x: torch.Tensor) -> torch.Tensor:
        """`[channels, samples]`, with zeros in the gaps; in place."""
        for gap in self.gaps:
            x[:, gap] = 0
        return x

    @cached_property
    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places just outside of the signals, as far as a filter reaches, and for each the end that it is to equal."""
        steps = range(FILTER_REACH)
        pairs = [(start - 1 - step, start) for start in self.starts for step in steps]
        pairs += [(stop + step, stop - 1) for stop in self.stops for step in steps]
        outside, ends = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        return outside, ends

    def hold_ends(self, x: torch.Tensor) -> torch.Tensor:
        """`[channels, samples]`, where each signal goes on as it ends; in place."""
        outside, ends = self.edges
        return x.index_copy_(1, outside, x.index_select(1, ends))


class Activation:
    """The anti-aliased snake of one layer: twice the rate, `x + sin(a * x)^2 / b`, and back."""

    def __init__(self, activation: Any) -> None:
        snake = activation.act
        self.frequency = snake.alpha.detach().exp()
        self.gain = 1 / (snake.beta.detach().exp() + snake.no_div_by_zero)
        self.upsample, self.downsample = activation.upsample, activation.downsample

    def __call__(self, x: torch.Tensor, timeline: Timeline, padding: int) -> torch.Tensor:
        """`[channels, samples]`, changed in its gaps -> `[channels, padding + samples + padding]`, silent there."""
        double = self.upsample(timeline.hold_ends(x)[None])[0]
        wave = torch.sin(double * self.frequency[:, None])
        double.addcmul_(wave.square_(), self.gain[:, None])
        back = self.downsample(timeline.at_rate(2).hold_ends(double)[None])[0]
        return F.pad(timeline.silence(back), (padding, padding))


class CPUActivation(Activation):
    """The same by a compiled loop."""

    def __init__(self, activation: Any) -> None:
        super().__init__(activation)
        from vllm_omni.model_executor.models.qwen2_5_omni import token2wav_snake  # compiles: only where it is used

        self._activate = token2wav_snake.activate
        up, down = self.upsample.ratio * self.upsample.filter[0, 0], self.downsample.filter[0, 0]
        self._filters = token2wav_snake.phase_filters(up.numpy(), down.numpy())
        self._turns = (self.frequency / math.pi).numpy()
        self._gains = self.gain.numpy()

    def __call__(self, x: torch.Tensor, timeline: Timeline, padding: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] + 2 * padding)
        starts, stops = torch.tensor(timeline.starts).numpy(), torch.tensor(timeline.stops).numpy()
        self._activate(x.numpy(), out.numpy(), starts, stops, self._turns, self._gains, self._filters)
        return out


class ActivatedConv:
    """An activation and the convolution after it.

    The convolution's padding comes from the activation: a CPU takes five times as long for one that pads itself.
    """

    def __init__(self, activation: Activation, conv: nn.Conv1d) -> None:
        self.activation = activation
        self.weight, self.bias = conv.weight, conv.bias
        self.padding, self.dilation = int(conv.padding[0]), conv.dilation

    def __call__(self, x: torch.Tensor, timeline: Timeline) -> torch.Tensor:
        """`[channels, samples]` -> the same; anything may be in the gaps."""
        padded = self.activation(x, timeline, self.padding)
        return F.conv1d(padded[None], self.weight, self.bias, dilation=self.dilation)[0]


class AMPBlock:
    """Three pairs of convolutions, each after an activation, with a sum around each pair."""

    def __init__(self, block: Any, activation: type[Activation]) -> None:
        acts = [activation(act) for act in block.activations]
        first = map(ActivatedConv, acts[::2], block.convs1)
        second = map(ActivatedConv, acts[1::2], block.convs2)
        self.pairs = [*zip(first, second, strict=True)]

    def __call__(self, x: torch.Tensor, timeline: Timeline) -> torch.Tensor:
        """`[channels, samples]` -> the same; anything may be in the gaps."""
        for first, second in self.pairs:
            x = second(first(x, timeline), timeline).add_(x)
        return x


class BigVGAN:
    """Waveforms for a batch of spectrograms; made when the weights have been loaded."""

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        self._bigvgan = cast(Any, bigvgan)
        self.device = self._bigvgan.conv_pre.weight.device
        activation = CPUActivation if self.device.type == "cpu" else Activation
        blocks = [AMPBlock(block, activation) for block in self._bigvgan.resblocks]
        width = self._bigvgan.num_residual_blocks
        ups: list[nn.ConvTranspose1d] = [up[0] for up in self._bigvgan.ups]
        self.levels = [(up, blocks[level * width :][:width]) for level, up in enumerate(ups)]
        self.rates: list[int] = [up.stride[0] for up, _ in self.levels]
        self.last = ActivatedConv(activation(self._bigvgan.activation_post), self._bigvgan.conv_post)
        self.gap = max(_gap_frames(self._bigvgan, self.rates))

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.rates)

    def decode(self, mels: list[torch.Tensor]) -> list[torch.Tensor]:
        """`[frames, mel_dim]`, one frame or more, of each spectrogram -> float32 `[samples]` of each, in [-1, 1]."""
        timeline = Timeline(tuple(mel.shape[0] for mel in mels), self.gap, self.device)
        x = mels[0].new_zeros(self._bigvgan.config.mel_dim, timeline.num_samples)
        for mel, start, stop in zip(mels, timeline.starts, timeline.stops, strict=True):
            x[:, start:stop] = self._bigvgan.process_mel_spectrogram(mel.t())
        x = self._bigvgan.conv_pre(x)
        for up, blocks in self.levels:
            x = up(timeline.silence(x))
            timeline = timeline.at_rate(up.stride[0])
            x = _mean([block(x, timeline) for block in blocks])
        wave = self.last(x, timeline)[0].clamp_(-1, 1)
        return [wave[start:stop] for start, stop in zip(timeline.starts, timeline.stops, strict=True)]


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    total, *others = parts
    for other in others:
        total += other
    return total.div_(len(parts))


def _gap_frames(bigvgan: Any, rates: list[int]) -> Iterator[int]:
    """Frames that convolutions and filters reach beyond an end, at each of the rates between mel and wave."""
    yield bigvgan.conv_pre.padding[0]
    rate, width = 1, bigvgan.num_residual_blocks
    for level, step in enumerate(rates):
        rate *= step
        reach = [conv.padding[0] for block in bigvgan.resblocks[level * width :][:width] for conv in block.convs1]
        yield -(-max(*reach, FILTER_REACH, bigvgan.conv_post.padding[0]) // rate)
