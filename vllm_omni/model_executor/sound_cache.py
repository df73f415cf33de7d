# SPDX-License-Identifier: Apache-2.0
"""Encoded reference sounds: a voice that many requests have is encoded once. Knows no model."""

import hashlib
from collections.abc import Callable

import torch
from vllm.utils.cache import LRUCache

from vllm_omni.metrics.stats import CacheCounts

MAX_BYTES = 64 << 20
"""A minute of sound has at most 192 kB of Mimi's codes, so that it holds hours of sound."""


class SoundCache:
    """Finds what encoders made of a sound by its samples.

    The least recently used results are removed first. They are on the CPU: what a device's memory has beside weights
    and activations belongs to the KV cache.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes`: of all results."""
        self._results: LRUCache[tuple[object, bytes], torch.Tensor] = LRUCache(max_bytes, getsizeof=_num_bytes)

    @property
    def counts(self) -> CacheCounts:
        """Hits and queries, counted in calls of encoders. May be read by any thread."""
        stats = self._results.stat()
        return CacheCounts(queries=stats.total, hits=stats.hits)

    def clear(self) -> None:
        """Forgets all results."""
        self._results.clear()

    def encode(
        self, sound: torch.Tensor, device: torch.device, *encoders: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """
        Args:
            sound: `[samples]`, on the CPU.
            encoders: Each takes the sound on the device. What one makes depends on the samples only.

        Returns:
            What each makes, on the device. It must not be written to.
        """
        digest = hashlib.sha256(sound.contiguous().numpy().data).digest()
        made = []
        for encoder in encoders:
            found = self._results.get((encoder, digest))
            if found is not None:
                made.append(found.to(device))
                continue
            made.append(encoder(sound.to(device)))
            self._results.put_if_fits((encoder, digest), made[-1].to("cpu", copy=True))
        return made


def _num_bytes(result: torch.Tensor) -> int:
    return result.nbytes
