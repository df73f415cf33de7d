# SPDX-License-Identifier: Apache-2.0
"""Windows of vocoders that look ahead give one pass: with a convolution as decoder, whose reach is known."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni.model_executor.layers.lookahead_vocoder import LookaheadVocoder

LENGTHS = {"a": 1, "b": 9, "c": 40, "d": 41}
CODEBOOKS = 3


class Vocoder(LookaheadVocoder):
    """The wave of a frame depends on 4 frames on either side."""

    hop = 2
    num_context = 4

    def __init__(self, delay: int, max_batch_frames: int) -> None:
        super().__init__()
        self.delay = delay
        self.max_batch_frames = max_batch_frames
        self.conv = nn.Conv1d(CODEBOOKS, self.hop, 9, padding=4).requires_grad_(False)

    def align(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[: max(len(rows) - self.delay, 0)]

    def decode(self, frames: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self.conv(frames.float().transpose(1, 2)).transpose(1, 2)[:, start:stop].flatten(1)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("max_batch_frames", [7, 64])
def test_any_windows_of_several_requests_give_one_pass(delay: int, max_batch_frames: int) -> None:
    rng = random.Random(delay)
    torch.manual_seed(0)
    vocoder = Vocoder(delay, max_batch_frames)
    rows = {name: torch.randint(100, (length, CODEBOOKS)) for name, length in LENGTHS.items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in rows}
    waves: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
    done = dict.fromkeys(rows, 0)
    left = list(rows)
    while left:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        sizes = {name: min(rng.choice((0, 1, 2, 7, 30)), LENGTHS[name] - done[name]) for name in chosen}
        last = {name for name, size in sizes.items() if done[name] == LENGTHS[name] and not size}
        given = [
            {"codes": rows[name][done[name] : done[name] + size], "state": states[name], "is_last": name in last}
            for name, size in sizes.items()
        ]
        made = vocoder(torch.empty(0), torch.empty(0), runtime_additional_information=given)
        for (name, size), output in zip(sizes.items(), made, strict=True):
            waves[name].append(output["audio"])
            done[name] += size
            ready = max(done[name] - delay - (0 if name in last else vocoder.num_context), 0)
            assert sum(map(len, waves[name])) == ready * vocoder.hop, "sound comes as soon as it is known"
        left = [name for name in left if name not in last]
    for name, whole in rows.items():
        frames = vocoder.align(whole)
        expected = vocoder.decode(frames[None], 0, len(frames))[0] if len(frames) else torch.empty(0)
        torch.testing.assert_close(torch.cat(waves[name]), expected)
