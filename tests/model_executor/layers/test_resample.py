# SPDX-License-Identifier: Apache-2.0
"""Resampling against what torchaudio 2.11 makes of a sound, and of sines."""

import math

import pytest
import torch

from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import resample

THEIRS = [0.7573, 0.6349, -0.7738, -0.6976, 0.6511, 0.8084, -0.5654, -0.8274]
"""Of `sin(1), sin(2), ... sin(12)`, from 24000 to 16000 samples per second."""


def test_samples_are_those_of_torchaudio() -> None:
    sound = torch.arange(1, 13, dtype=torch.float32).sin()
    both = resample(torch.stack((sound, -sound)), 24000, 16000)
    torch.testing.assert_close(both, torch.tensor([THEIRS, [-sample for sample in THEIRS]]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rates", [(24000, 16000), (16000, 24000), (44100, 16000), (16000, 16000)])
def test_a_sine_stays_a_sine(rates: tuple[int, int]) -> None:
    def sine(rate: int) -> torch.Tensor:
        return (2 * math.pi * 440 / rate * torch.arange(rate // 10, dtype=torch.float64)).sin().float()

    made = resample(sine(rates[0])[None], *rates)[0]
    assert len(made) == rates[1] // 10
    torch.testing.assert_close(made[100:-100], sine(rates[1])[100:-100], rtol=0, atol=5e-3)
