# SPDX-License-Identifier: Apache-2.0
"""Random numbers of several rows that are computed together: each row draws those that it would draw alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class RowNoise(TorchFunctionMode):
    """While it is active, a random tensor whose first dimension are the rows is drawn row by row.

    The generator of a row begins with its seed, as torch's own does after `torch.manual_seed`. A tensor of another
    shape is drawn as ever: whether rows are equal to single ones must be found out.

    Attributes:
        lengths: Of each row, without padding, in the last dimension of tensors of the next normal numbers. None: there
            is no padding.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._seeds = seeds
        self._generators: dict[torch.device, list[torch.Generator]] = {}
        self.lengths: Sequence[int] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.randn and self._are_rows(size := torch.Size(_flat(args))):
            like = torch.empty(size, **given)
            return self._normal(like)
        if func is torch.randn_like and self._are_rows(args[0].shape):
            return self._normal(args[0])
        if func in (torch.multinomial, torch.bernoulli) and args[0].shape[0] % len(self._seeds) == 0:
            parts = args[0].chunk(len(self._seeds))  # A row may have several, one for each codebook.
            rows = zip(parts, self._generators_of(args[0].device), strict=True)
            return torch.cat([func(part, *args[1:], **given, generator=generator) for part, generator in rows])
        return func(*args, **given)

    def _are_rows(self, size: torch.Size) -> bool:
        return len(size) > 0 and size[0] == len(self._seeds)

    def _generators_of(self, device: torch.device) -> list[torch.Generator]:
        """The generator of each row on a device: `torch.manual_seed` seeds that of each device."""
        if device not in self._generators:
            self._generators[device] = [torch.Generator(device).manual_seed(seed) for seed in self._seeds]
        return self._generators[device]

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        """Normal numbers, 0 in the padding; a row has the layout in memory that it has alone."""
        drawn = torch.zeros_like(like)
        lengths = self.lengths or [like.shape[-1]] * len(like)
        for index, (length, generator) in enumerate(zip(lengths, self._generators_of(like.device), strict=True)):
            row = torch.empty_like(like[index : index + 1, ..., :length])
            drawn[index : index + 1, ..., :length] = row.normal_(generator=generator)
        return drawn


def _flat(args: tuple[Any, ...]) -> Sequence[int]:
    return args[0] if len(args) == 1 and not isinstance(args[0], int) else args
