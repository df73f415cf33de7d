# SPDX-License-Identifier: Apache-2.0
"""The second half of the vocoder: BigVGAN, which turns mel spectrograms into waveforms.

The parameters are HF transformers' own. Here many spectrograms run as one: one after the other in time, with gaps as
wide as any convolution reads. For convolutions gaps are zero, and for activations each signal continues with its last
sample beyond its ends, so that every waveform equals that of its spectrogram alone.

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

LENGTH_STEP = 32
"""A batch is padded to a multiple of this: a CPU prepares its convolutions again for each new length."""

MAX_TAP_CHANNELS = 32
"""Up to this number of channels one product for each tap, which needs no preparation, is faster on a CPU."""

FILTER_REACH = 6
"""Samples at the double rate that an activation reads beyond the ends of its signal."""


@dataclass(frozen=True)
class BatchLayout:
    """Signals one after the other, at one rate.

    Attributes:
        lengths: Samples of each signal.
        gap: Samples before the first and between any two signals.
        tail: Samples after the last one, at least as many.
        device: Of the tensors made here.
    """

    lengths: tuple[int, ...]
    gap: int
    tail: int
    device: torch.device

    def at_rate(self, rate: int) -> "BatchLayout":
        lengths = tuple(rate * length for length in self.lengths)
        return BatchLayout(lengths, rate * self.gap, rate * self.tail, self.device)

    @cached_property
    def starts(self) -> list[int]:
        return [self.gap * (index + 1) + sum(self.lengths[:index]) for index in range(len(self.lengths))]

    @cached_property
    def stops(self) -> list[int]:
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @cached_property
    def num_samples(self) -> int:
        return self.stops[-1] + self.tail

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
        """Indices just outside of the signals, as far as a filter reads, and for each the index of the signal's end."""
        steps = range(FILTER_REACH)
        pairs = [(start - 1 - step, start) for start in self.starts for step in steps]
        pairs += [(stop + step, stop - 1) for stop in self.stops for step in steps]
        outside, ends = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        return outside, ends

    def hold_ends(self, x: torch.Tensor) -> torch.Tensor:
        """`[channels, samples]`, with each signal continued by its end samples; in place."""
        outside, ends = self.edges
        return x.index_copy_(1, outside, x.index_select(1, ends))


class Activation:
    """The anti-aliased snake of one layer: upsampling, `x + sin(a * x)^2 / b`, and downsampling."""

    def __init__(self, activation: Any) -> None:
        snake = activation.act
        self.frequency = snake.alpha.detach().exp()
        self.gain = 1 / (snake.beta.detach().exp() + snake.no_div_by_zero)
        self.upsample, self.downsample = activation.upsample, activation.downsample

    def __call__(self, x: torch.Tensor, layout: BatchLayout, padding: int) -> torch.Tensor:
        """`[channels, samples]`, changed in its gaps -> `[channels, padding + samples + padding]`, zero there."""
        double = self.upsample(layout.hold_ends(x)[None])[0]
        wave = torch.sin(double * self.frequency[:, None])
        double.addcmul_(wave.square_(), self.gain[:, None])
        back = self.downsample(layout.at_rate(2).hold_ends(double)[None])[0]
        return F.pad(layout.silence(back), (padding, padding))


class CPUActivation(Activation):
    """Computes the activation by a compiled loop."""

    def __init__(self, activation: Any) -> None:
        super().__init__(activation)
        from vllm_omni.model_executor.models.qwen2_5_omni import token2wav_snake  # compiles on import

        self._activate = token2wav_snake.activate
        up, down = self.upsample.ratio * self.upsample.filter[0, 0], self.downsample.filter[0, 0]
        self._filters = token2wav_snake.phase_filters(up.numpy(), down.numpy())
        self._turns = (self.frequency / math.pi).numpy()
        self._gains = self.gain.numpy()

    def __call__(self, x: torch.Tensor, layout: BatchLayout, padding: int) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] + 2 * padding)
        starts, stops = torch.tensor(layout.starts).numpy(), torch.tensor(layout.stops).numpy()
        self._activate(x.numpy(), out.numpy(), starts, stops, self._turns, self._gains, self._filters)
        return out


class ActivatedConv:
    """An activation and the convolution after it.

    The activation adds the padding: a convolution with padding takes five times as long on a CPU.
    """

    def __init__(self, activation: Activation, conv: nn.Conv1d) -> None:
        self.activation = activation
        self.weight, self.bias = conv.weight, conv.bias
        self.padding, self.dilation = int(conv.padding[0]), cast(tuple[int], conv.dilation)

    def __call__(self, x: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """`[channels, samples]` -> the same; the gaps are undefined."""
        return self._convolve(self.activation(x, layout, self.padding))

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x[None], self.weight, self.bias, dilation=self.dilation)[0]


class TapConv(ActivatedConv):
    """Computes the convolution by one matrix product for each tap."""

    def __init__(self, activation: Activation, conv: nn.Conv1d) -> None:
        super().__init__(activation, conv)
        self.taps = self.weight.detach().permute(2, 0, 1).contiguous()  # [taps, channels out, channels in]
        bias = self.taps.new_zeros(self.taps.shape[1]) if self.bias is None else self.bias.detach()
        self.start = bias[:, None]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        (step,) = self.dilation
        length = x.shape[1] - step * (self.taps.shape[0] - 1)
        out = torch.addmm(self.start, self.taps[0], x[:, :length])
        for index, tap in enumerate(self.taps[1:].unbind(), start=1):
            out.addmm_(tap, x[:, index * step :][:, :length])
        return out


def make_activated_conv(activation: Any, conv: nn.Conv1d) -> ActivatedConv:
    if conv.weight.device.type != "cpu":
        return ActivatedConv(Activation(activation), conv)
    convolution = TapConv if conv.in_channels <= MAX_TAP_CHANNELS else ActivatedConv
    return convolution(CPUActivation(activation), conv)


class TapUpsampling:
    """A transposed convolution by one matrix product for each tap.

    Libraries prepare theirs again for each length, which takes longer on a CPU than the rest of a waveform.
    """

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        (self.rate,), (padding,) = cast(tuple[int], conv.stride), cast(tuple[int], conv.padding)
        taps = conv.weight.detach().permute(2, 1, 0).contiguous()  # [taps, channels out, channels in]
        assert conv.bias is not None
        self.start = conv.bias.detach()[:, None]
        # Sample `rate * n + phase` of the output is the sum over its taps of tap times sample `n + shift` of the input.
        self.phases: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(self.rate)]
        for index, tap in enumerate(taps.unbind()):
            phase = (index - padding) % self.rate
            self.phases[phase].append((tap, (phase + padding - index) // self.rate))
        self.reach = max(abs(shift) for terms in self.phases for _, shift in terms)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[channels in, samples]` -> `[channels out, rate * samples]`"""
        length = x.shape[1]
        padded = F.pad(x, (self.reach, self.reach))
        phases = []
        for (tap, shift), *others in self.phases:
            out = torch.addmm(self.start, tap, padded[:, self.reach + shift :][:, :length])
            for tap, shift in others:
                out.addmm_(tap, padded[:, self.reach + shift :][:, :length])
            phases.append(out)
        return torch.stack(phases, dim=2).flatten(1)


class AMPBlock:
    """Three pairs of convolutions, each after an activation, with a sum around each pair."""

    def __init__(self, block: Any) -> None:
        first = map(make_activated_conv, block.activations[::2], block.convs1)
        second = map(make_activated_conv, block.activations[1::2], block.convs2)
        self.pairs = [*zip(first, second, strict=True)]

    def __call__(self, x: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """`[channels, samples]` -> the same; the gaps are undefined."""
        for first, second in self.pairs:
            x = second(first(x, layout), layout).add_(x)
        return x


class BigVGAN:
    """Waveforms for a batch of spectrograms; created after the weights are loaded."""

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        self._bigvgan = cast(Any, bigvgan)
        self.device = self._bigvgan.conv_pre.weight.device
        blocks = [AMPBlock(block) for block in self._bigvgan.resblocks]
        width = self._bigvgan.num_residual_blocks
        ups: list[nn.ConvTranspose1d] = [up[0] for up in self._bigvgan.ups]
        self.rates = [up.stride[0] for up in ups]
        upsample = [TapUpsampling(up) if self.device.type == "cpu" else up for up in ups]
        self.levels = [*zip(upsample, zip(*[iter(blocks)] * width, strict=True), strict=True)]
        self.last = make_activated_conv(self._bigvgan.activation_post, self._bigvgan.conv_post)
        self.gap = max(_gap_frames(self._bigvgan, self.rates))

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.rates)

    def decode(self, mels: list[torch.Tensor]) -> list[torch.Tensor]:
        """`[frames, mel_dim]`, one frame or more, of each spectrogram -> float32 `[samples]` of each, in [-1, 1]."""
        lengths = tuple(mel.shape[0] for mel in mels)
        num_frames = sum(lengths) + self.gap * (len(lengths) + 1)
        layout = BatchLayout(lengths, self.gap, self.gap + -num_frames % LENGTH_STEP, self.device)
        x = mels[0].new_zeros(self._bigvgan.config.mel_dim, layout.num_samples)
        for mel, start, stop in zip(mels, layout.starts, layout.stops, strict=True):
            x[:, start:stop] = self._bigvgan.process_mel_spectrogram(mel.t())
        x = self._bigvgan.conv_pre(x)
        for rate, (upsample, blocks) in zip(self.rates, self.levels, strict=True):
            x = upsample(layout.silence(x))
            layout = layout.at_rate(rate)
            x = _mean([block(x, layout) for block in blocks])
        wave = self.last(x, layout)[0].clamp_(-1, 1)
        return [wave[start:stop] for start, stop in zip(layout.starts, layout.stops, strict=True)]


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    total, *others = parts
    for other in others:
        total += other
    return total.div_(len(parts))


def _gap_frames(bigvgan: Any, rates: list[int]) -> Iterator[int]:
    """Frames that convolutions and filters read beyond an end, at each of the rates between mel and wave."""
    yield bigvgan.conv_pre.padding[0]
    rate, width = 1, bigvgan.num_residual_blocks
    for level, step in enumerate(rates):
        rate *= step
        reach = [conv.padding[0] for block in bigvgan.resblocks[level * width :][:width] for conv in block.convs1]
        yield -(-max(*reach, FILTER_REACH, bigvgan.conv_post.padding[0]) // rate)
