# SPDX-License-Identifier: Apache-2.0
"""Resampling on the device of a model, as torchaudio's `functional.resample`: by a sinc in a Hann window.

torchaudio has no builds for a torch of the CPU. One that reads a sound at two rates needs the samples that it gives.
"""

import math

import torch
import torch.nn.functional as F

SINC_WIDTH = 6
"""Zero crossings of the sinc on either side."""

ROLLOFF = 0.99
"""Cutoff, as a part of the lower rate's highest frequency."""


def resample(sounds: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
    """`[B, samples]` at one rate -> `[B, samples]` at another, each row by itself."""
    if rate == new_rate:
        return sounds
    old, new = rate // math.gcd(rate, new_rate), new_rate // math.gcd(rate, new_rate)
    cutoff = min(old, new) * ROLLOFF
    width = math.ceil(SINC_WIDTH * old / cutoff)
    inputs = torch.arange(-width, width + old, dtype=torch.float64) / old
    outputs = torch.arange(new, dtype=torch.float64)[:, None] / new
    time = ((inputs - outputs) * cutoff).clamp(-SINC_WIDTH, SINC_WIDTH)
    kernels = torch.sinc(time) * torch.cos(time * math.pi / (2 * SINC_WIDTH)) ** 2 * (cutoff / old)
    padded = F.pad(sounds, (width, width + old))[:, None]
    waves = F.conv1d(padded, kernels.to(sounds)[:, None], stride=old)  # [B, new, steps]
    return waves.transpose(1, 2).flatten(1)[:, : math.ceil(new * sounds.shape[1] / old)]
