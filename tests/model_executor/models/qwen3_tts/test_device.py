# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's codec and encoders on a simulated device: nothing mixes devices, and the results are those of a CPU."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.model_executor.models.speech import decode_in_windows
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu

from .prompts import sound
from .test_codec import load_codec, load_encoders

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str, str], Path]) -> Path:
    return checkpoint("qwen3_tts_base", "default")


def decode(codec: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """The waves of two requests in windows; one continues a reference."""
    codes = torch.randint(100, (2, 9, 4), generator=torch.Generator().manual_seed(0))
    return decode_in_windows(copy.deepcopy(codec).to(device), codes, (4, 9), num_silent=(0, 3))


def test_sound_in_windows(folder: Path, device: SimulatedDevice) -> None:
    codec = load_codec(folder)
    torch.testing.assert_close(on_cpu(decode(codec, DEVICE)), decode(codec, CPU))


@torch.no_grad()
def encode(encoders: tuple[nn.Module, nn.Module], device: torch.device) -> list[torch.Tensor]:
    samples = sound(1.5, 0)[0].to(device)
    return [copy.deepcopy(encoder).to(device)(samples) for encoder in encoders]


def test_encoders(folder: Path, device: SimulatedDevice) -> None:
    encoders = load_encoders(folder)
    torch.testing.assert_close(on_cpu(encode(encoders, DEVICE)), encode(encoders, CPU))
