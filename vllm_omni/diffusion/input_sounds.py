# SPDX-License-Identifier: Apache-2.0
"""Sounds of a prompt as tensors for a diffusion stage: at the rate, and with the channels, of a checkpoint's VAE."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.multimodal.audio import resample_audio_pyav

_RATES = (1000, 768_000)
_MOST_CHANNELS = 8


class SoundFormat(NamedTuple):
    """What a VAE encodes."""

    sample_rate: int
    num_channels: int


def read_sound(
    wave: np.ndarray | torch.Tensor, rate: float, wanted: SoundFormat, max_s: float, where: str
) -> torch.Tensor:
    """
    Args:
        wave: `[samples]`, `[channels, samples]` or `[samples, channels]`: float in [-1, 1], or integers.
        rate: Its samples per second.
        max_s: The longest sound that is taken.
        where: Names the sound in errors.

    Returns:
        float32 `[channels, samples]`. One channel is repeated; several are averaged if their number is not the wanted.

    Raises:
        TypeError, ValueError: It is no sound, empty, too long, or has values that are not finite.
    """
    if not _RATES[0] <= rate <= _RATES[1]:
        raise ValueError(f"{where}: {rate!r} is no number of samples per second from {_RATES[0]} to {_RATES[1]}")
    channels = _as_channels(wave, where)
    seconds = channels.shape[1] / rate
    if not 0 < seconds <= max_s:
        raise ValueError(f"{where} has {seconds:g} s; this stage takes sounds of at most {max_s:g} s (max_seconds)")
    if not np.isfinite(channels).all():
        raise ValueError(f"{where} has values that are not finite")
    if len(channels) != wanted.num_channels:
        channels = channels.mean(0, keepdims=True)
    made = [resample_audio_pyav(each, orig_sr=rate, target_sr=wanted.sample_rate) for each in channels]
    return torch.from_numpy(np.stack(made).astype(np.float32)).expand(wanted.num_channels, -1).contiguous()


def _as_channels(wave: np.ndarray | torch.Tensor, where: str) -> np.ndarray:
    array = wave.detach().cpu().numpy() if isinstance(wave, torch.Tensor) else wave
    if array.dtype.kind not in "fi" or array.ndim not in (1, 2):
        raise TypeError(f"{where}: a sound's waveform must be numbers [samples] or [channels, samples]")
    if array.dtype.kind == "i":
        array = array / -float(np.iinfo(array.dtype).min)
    array = array.T if array.ndim == 2 and array.shape[0] > array.shape[1] else array
    array = np.atleast_2d(array).astype(np.float32)
    if len(array) > _MOST_CHANNELS:
        raise ValueError(f"{where} has shape {list(array.shape)}; a sound has at most {_MOST_CHANNELS} channels")
    return array
