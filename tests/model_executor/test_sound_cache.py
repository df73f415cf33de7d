# SPDX-License-Identifier: Apache-2.0
"""Sounds are found by their samples, and the memory of what was made of them is bounded."""

import torch

from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.sound_cache import SoundCache

CPU = torch.device("cpu")


class Encoder:
    """Makes 64 bytes of a sound."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, sound: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.full((8,), int(sound.sum()))


def test_the_same_samples_are_encoded_once_by_each_encoder() -> None:
    cache, encoders = SoundCache(), (Encoder(), Encoder())
    sounds = torch.arange(12.0).split([4, 8])
    first = [cache.encode(sound, CPU, *encoders) for sound in sounds]
    again = [cache.encode(sound.clone(), CPU, *encoders) for sound in sounds]
    assert [encoder.num_calls for encoder in encoders] == [2, 2]
    assert cache.counts == CacheCounts(queries=8, hits=4)
    for made, found in zip(first, again, strict=True):
        assert all(map(torch.equal, made, found)) and len(made) == 2
    assert not torch.equal(first[0][0], first[1][0])


def test_a_sound_of_other_samples_is_another() -> None:
    cache, encoder = SoundCache(), Encoder()
    for sound in (torch.zeros(4), torch.zeros(5), torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(0)):
        cache.encode(sound, CPU, encoder)
    assert encoder.num_calls == 4


def test_the_least_recently_used_results_are_removed() -> None:
    cache, encoder = SoundCache(max_bytes=128), Encoder()
    for value in (0, 1, 0, 2, 0, 1):
        (made,) = cache.encode(torch.tensor([float(value)]), CPU, encoder)
        assert made.tolist() == [value] * 8
    assert encoder.num_calls == 4, "0, 1, 2, and 1 again"
    small = SoundCache(max_bytes=63)
    assert small.encode(torch.ones(1), CPU, encoder)[0].tolist() == [1] * 8, "too large to be kept"
