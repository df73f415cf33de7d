# SPDX-License-Identifier: Apache-2.0
"""Codes of speech, and the vocoder that turns them into sound.

A frame of 80 ms is described by its log-mel spectrum, reduced by PCA; residual k-means gives its codes. The vocoder
(`Qwen3OmniMoeCode2Wav`) learns the sound of the codes with a log-mel loss of several resolutions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from coloured_shapes.speech import FRAME, SAMPLE_RATE
from training.loop import Training

NUM_CODES, NUM_GROUPS, NUM_COMPONENTS = 128, 8, 96
HOP, NUM_MELS = 240, 64
BATCH, PIECE = 8, 8
"""Of the vocoder's training: pieces of a step, and frames of a piece."""


class LogMel(nn.Module):
    """Waves `[batch, samples]` to log-mel `[batch, num_mels, samples // hop]`; frame i begins at sample i * hop.

    Magnitudes below `floor` are raised to it.
    """

    window: torch.Tensor
    filters: torch.Tensor

    def __init__(self, n_fft: int, hop: int, num_mels: int, floor: float = 1e-4) -> None:
        super().__init__()
        self.n_fft, self.hop, self.floor = n_fft, hop, floor
        self.register_buffer("window", torch.hann_window(n_fft))
        filters = mel_filter_bank(n_fft // 2 + 1, num_mels, 20.0, SAMPLE_RATE / 2, SAMPLE_RATE)
        self.register_buffer("filters", torch.from_numpy(filters.T).float())

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(waves, ((self.n_fft - self.hop) // 2, self.n_fft - self.hop))
        spectrum = torch.stft(padded, self.n_fft, self.hop, window=self.window, center=False, return_complex=True)
        power = spectrum.real**2 + spectrum.imag**2
        return (self.filters @ (power + 1e-9).sqrt()).clamp(min=self.floor).log()[..., : waves.shape[-1] // self.hop]


@dataclass
class Quantizer:
    """Residual k-means over PCA components.

    Attributes:
        mean, components: `[512]`, `[512, 96]`.
        codebooks: `[groups, codes, 96]`.
    """

    mean: torch.Tensor
    components: torch.Tensor
    codebooks: torch.Tensor

    @classmethod
    def fit(cls, waves: list[np.ndarray], generator: torch.Generator) -> "Quantizer":
        features = torch.cat([frame_features(wave) for wave in waves])
        mean = features.mean(0)
        chosen = torch.randperm(len(features), generator=generator)[:20000]
        _, _, directions = torch.linalg.svd(features[chosen] - mean, full_matrices=False)
        components = directions[:NUM_COMPONENTS].T.contiguous()
        residual = (features - mean) @ components
        codebooks = []
        for _ in range(NUM_GROUPS):
            codebooks.append(_k_means(residual, NUM_CODES, generator))
            residual = residual - codebooks[-1][_nearest(residual, codebooks[-1])]
        return cls(mean, components, torch.stack(codebooks))

    def encode(self, wave: np.ndarray) -> torch.Tensor:
        """int64 `[frames, groups]` of samples `[frames * 1920]`."""
        residual = (frame_features(wave) - self.mean) @ self.components
        codes = []
        for codebook in self.codebooks:
            codes.append(_nearest(residual, codebook))
            residual = residual - codebook[codes[-1]]
        return torch.stack(codes, 1)


_log_mel = LogMel(1024, HOP, NUM_MELS)


def frame_features(wave: np.ndarray) -> torch.Tensor:
    """float32 `[frames, 512]`; a last incomplete frame is padded with zeros."""
    wave = np.pad(wave, (0, -len(wave) % FRAME))
    mel = _log_mel(torch.from_numpy(wave)[None])[0]  # [mels, frames * 8]
    return mel.T.reshape(len(wave) // FRAME, -1)


def _nearest(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    distances = (centers**2).sum(1) - 2 * points @ centers.T
    return distances.argmin(1)


def _k_means(points: torch.Tensor, num: int, generator: torch.Generator, rounds: int = 30) -> torch.Tensor:
    centers = points[torch.randperm(len(points), generator=generator)[:num]].clone()
    for _ in range(rounds):
        nearest = _nearest(points, centers)
        counts = torch.bincount(nearest, minlength=num)
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        centers = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centers)
        for empty in (counts == 0).nonzero():
            centers[empty] = points[torch.randint(len(points), (1,), generator=generator)]
    return centers


def vocoder_config() -> Qwen3OmniMoeCode2WavConfig:
    return Qwen3OmniMoeCode2WavConfig(
        codebook_size=NUM_CODES, num_quantizers=NUM_GROUPS, hidden_size=192, intermediate_size=384,
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6, sliding_window=8, decoder_dim=192,
        upsample_rates=[4, 4, 5, 6], upsampling_ratios=[2, 2],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip


class SpectralLoss(nn.Module):
    """Mean absolute difference of log-mel spectra of several resolutions, of what is loud enough to be heard."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((256, 64, 32), (512, 128, 64), (1024, 256, 80), (2048, 512, 100))
        self.mels = nn.ModuleList(LogMel(*size, floor=1e-2) for size in sizes)

    def forward(self, made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.stack([(mel(made) - mel(target)).abs().mean() for mel in self.mels]).mean()


def train_vocoder(
    folder: Path, vocoder: Qwen3OmniMoeCode2Wav,
    sample: Callable[[random.Random], tuple[torch.Tensor, np.ndarray]], steps: int,
) -> None:  # fmt: skip
    """
    Args:
        sample: Returns codes, int64 `[frames, groups]`, and the audio of the same speech.
    """
    loss_of = SpectralLoss()

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        pieces = []
        for _ in range(BATCH):
            codes, audio = sample(rng)
            begin = rng.randrange(max(1, len(codes) - PIECE + 1))
            pieces.append((_slice(codes, begin), _samples(audio, begin)))
        code, target = (torch.stack(parts) for parts in zip(*pieces, strict=True))
        made = vocoder(code.transpose(1, 2)).squeeze(1)  # [batch, groups, frames] -> [batch, samples]
        loss = loss_of(made, target[:, : made.shape[1]])
        return loss, {"loss": loss.item()}

    Training(folder, "vocoder", [vocoder], steps, 1e-3).run(compute)


def _slice(codes: torch.Tensor, begin: int) -> torch.Tensor:
    piece = codes[begin : begin + PIECE]
    return torch.cat([piece, piece[-1:].expand(PIECE - len(piece), -1)])


def _samples(audio: np.ndarray, begin: int) -> torch.Tensor:
    piece = audio[begin * FRAME : (begin + PIECE) * FRAME]
    return torch.from_numpy(np.pad(piece, (0, PIECE * FRAME - len(piece))))
