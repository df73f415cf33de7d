# SPDX-License-Identifier: Apache-2.0
"""The encoder of voices: a sound as one vector, which stands for a speaker in the talker's prompt."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSSpeakerEncoderConfig

FFT_SIZE, HOP = 1024, 256
"""Samples. The reference fixes them, as all numbers of its spectrogram."""


class SpeakerEncoder(ECAPA_TimeDelayNet):
    """Qwen2.5-Omni's network, with the same names of weights, behind a mel spectrogram. In float32: it is small, and
    its statistics are sums over the whole sound."""

    def __init__(self, config: Qwen3TTSSpeakerEncoderConfig) -> None:
        fields: Any = config  # those that it reads of a `Qwen2_5OmniDiTConfig`
        super().__init__(fields)
        self.float().eval().requires_grad_(False)
        filters = mel_filter_bank(
            num_frequency_bins=FFT_SIZE // 2 + 1,
            num_mel_filters=config.mel_dim,
            min_frequency=0,
            max_frequency=config.sample_rate / 2,
            sampling_rate=config.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.filters = nn.Buffer(torch.tensor(filters, dtype=torch.float32), persistent=False)
        self.window = nn.Buffer(torch.hann_window(FFT_SIZE, dtype=torch.float32), persistent=False)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """float32 `[samples]` at `sample_rate`, at least 5 * 256, -> `[enc_dim]`"""
        return super().forward(self._to_mel(sound)[None])[0]

    def _to_mel(self, sound: torch.Tensor) -> torch.Tensor:
        """-> `[samples // 256, mel_dim]`, logarithms of amplitudes."""
        padding = (FFT_SIZE - HOP) // 2
        padded = F.pad(sound[None], (padding, padding), mode="reflect")[0]
        spectrum = torch.stft(padded, FFT_SIZE, HOP, window=self.window, center=False, return_complex=True)
        amplitudes = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()  # [frequencies, frames]
        return (amplitudes.T @ self.filters).clamp_min(1e-5).log()
