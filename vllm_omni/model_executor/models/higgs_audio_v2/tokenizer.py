# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's codec: encodes sounds as frames of codes, and decodes them.

It has the parameters of HF transformers' `HiggsAudioV2TokenizerModel` under the same names, and computes the same. That
one does not import without torchaudio, of which there are no builds for a torch of the CPU: what it adds to
`XcodecModel` is here.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import HiggsAudioV2TokenizerConfig, XcodecModel
from transformers.models.xcodec.modeling_xcodec import XcodecVectorQuantization

CODEC = "bosonai/higgs-audio-v2-tokenizer"
"""The tokenizer's checkpoint: a folder of the pipeline's checkpoint, otherwise a name on the hub."""

SEMANTIC_PADDING = 160
"""Samples on either side of what the semantic model reads."""

SINC_WIDTH = 6
"""Zero crossings of the sinc on either side."""

ROLLOFF = 0.99
"""Cutoff, as a part of the lower rate's highest frequency."""


def find_codec(checkpoint: str) -> str:
    """The codec's checkpoint, as the loader of stage configurations finds it."""
    folder = Path(checkpoint, CODEC)
    return str(folder) if folder.is_dir() else CODEC


def read_codec_config(checkpoint: str) -> HiggsAudioV2TokenizerConfig:
    config: HiggsAudioV2TokenizerConfig = HiggsAudioV2TokenizerConfig.from_pretrained(find_codec(checkpoint))
    return config


def num_sound_frames(config: Any, num_samples: int) -> int:
    """Frames of a sound: what the semantic model's convolutions leave of it."""
    length = math.ceil(num_samples * config.semantic_sample_rate / config.sample_rate) + 2 * SEMANTIC_PADDING
    semantic = config.semantic_model_config
    for kernel, stride in zip(semantic.conv_kernel, semantic.conv_stride, strict=True):
        length = (length - kernel) // stride + 1
    return math.ceil(length / config.semantic_downsample_factor)


class HiggsAudioTokenizer(XcodecModel):
    """Each quantizer has projections; the semantic model reads another rate, and every nth of its rows is used."""

    config_class: Any = HiggsAudioV2TokenizerConfig

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__(config)
        self.quantizer.quantizers = nn.ModuleList(ProjectedQuantizer(config) for _ in range(config.num_quantizers))

    def _extract_semantic_features(self, input_values: torch.Tensor) -> Any:
        """`[B, 1, samples]` -> `[B, frames, hidden]`."""
        config: Any = self.config
        sound = resample(input_values[:, 0], config.sample_rate, config.semantic_sample_rate)
        padded = F.pad(sound, (SEMANTIC_PADDING, SEMANTIC_PADDING))
        states = self.semantic_model(padded, output_hidden_states=True).hidden_states
        return torch.stack(states, dim=1).mean(1)[:, :: config.semantic_downsample_factor]


class ProjectedQuantizer(XcodecVectorQuantization):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def encode(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, hidden, frames]` -> `[B, frames]` int64."""
        return self.codebook.encode(self.project_in(hidden_states.transpose(1, 2)))

    def decode(self, embed_ind: torch.Tensor) -> torch.Tensor:
        """`[B, frames]` int64 -> `[B, hidden, frames]`."""
        return self.project_out(self.codebook.decode(embed_ind)).transpose(1, 2)


def resample(sounds: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
    """`[B, samples]` at one rate -> `[B, samples]` at another, each row by itself: as torchaudio's
    `functional.resample`, by a sinc in a Hann window. torchaudio has no builds for a torch of the CPU."""
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
