# SPDX-License-Identifier: Apache-2.0
"""The state of a codec's causal layers between two windows of a request, for the rows of one batch.

A causal layer depends on earlier windows by its last few inputs only. With them in front of its next inputs it computes
the same as in one pass over everything, and computes nothing twice. A request's inputs of all layers are one flat
vector, its *state*; before the first window it is zeros, the layers' padding at the start. Rows of a batch differ in
length: on the right of a row's own positions is padding, which no causal layer reads.

This file knows no layer: they take their part of the state in the order in which they run.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch


class LayerStates:
    """The states of a batch's rows: each layer takes its part of the old ones and adds its part of the new ones.

    Attributes:
        num_frames: Positions of each row in this batch: frames, until layers `grow` them.
        num_before: Positions of each row's request before this batch.
    """

    def __init__(
        self, states: torch.Tensor, num_frames: Sequence[int], num_before: Sequence[int], is_kept: bool = True
    ) -> None:
        """
        Args:
            states: `[B, size]`; zeros where `num_before` is 0.
            is_kept: False where no row continues after this batch: no new states are needed.
        """
        self.num_frames = num_frames
        self.num_before = num_before
        self._states = states
        self._taken = 0
        self._is_kept = is_kept
        self._kept: list[torch.Tensor] = []
        self._lengths = torch.tensor(num_frames, device=states.device)
        first = [row for row, before in enumerate(num_before) if not before]
        self._is_all_first = len(first) == len(num_before)
        is_even = len(set(num_frames)) == 1 and (self._is_all_first or not first)
        self._even_length = num_frames[0] if is_even else None
        self._first = torch.tensor(first, dtype=torch.int64, device=states.device)

    def take(self, *shape: int) -> torch.Tensor:
        """`[B, *shape]`, the next part of the states. Not to be written to."""
        start = self._taken
        self._taken += int(torch.Size(shape).numel())
        return self._states[:, start : self._taken].view(-1, *shape)

    def keep(self, whole: torch.Tensor, num_taken: int, dim: Literal[-1, -2] = -1) -> None:
        """Adds the last inputs of a layer to the new states.

        Args:
            whole: What was taken and the inputs after it, `num_taken + L` positions along `dim`.
        """
        if not self._is_kept:
            return
        if self._even_length is not None:
            last = whole.narrow(dim, self._even_length, num_taken)
        else:
            shape = list(whole.shape)
            shape[dim] = num_taken
            index = self._lengths.view(-1, *[1] * (whole.ndim - 1)) + self._offsets(whole, num_taken, dim)
            last = whole.gather(dim, index.expand(shape))
        self._kept.append(last.contiguous().flatten(1))  # Not a view, which would hold the layer's whole input.

    @staticmethod
    def _offsets(whole: torch.Tensor, num_taken: int, dim: int) -> torch.Tensor:
        """0, 1, ... along `dim` of a tensor of as many dimensions as `whole`."""
        return torch.arange(num_taken, device=whole.device).view(-1, *[1] * (-1 - dim))

    def grow(self, factor: int) -> None:
        """Makes each position `factor` positions, from this layer on."""
        self.num_frames = [factor * number for number in self.num_frames]
        self.num_before = [factor * number for number in self.num_before]
        self._lengths = self._lengths * factor
        if self._even_length is not None:
            self._even_length *= factor

    def drop_beginning(self, x: torch.Tensor, num_positions: int) -> torch.Tensor:
        """`[B, C, L]` without the first positions of the rows of a request's first window.

        Returns:
            For rows of both kinds: the same tensor, changed, still of length L.
        """
        if not len(self._first):
            return x
        self._lengths = self._lengths.index_add(0, self._first, torch.full_like(self._first, -num_positions))
        if not self._is_all_first:
            x[self._first, :, :-num_positions] = x[self._first, :, num_positions:]
            return x
        if self._even_length is not None:
            self._even_length -= num_positions
        return x[..., num_positions:]

    def new_states(self) -> torch.Tensor:
        """`[B, size]`, after all layers have run."""
        assert self._taken == self._states.shape[1], f"{self._taken} of {self._states.shape[1]} values were taken"
        return torch.cat(self._kept, dim=1)


class StateKeys:
    """Replaces HF transformers' cache of keys and values, of which its attention calls `update` only."""

    def __init__(self, states: LayerStates, window: int) -> None:
        """
        Args:
            window: Positions that a position attends to, itself included.
        """
        self._states = states
        self._num_kept = window - 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, heads, L, head_dim]` each -> the same with the `window - 1` positions before them."""
        return self._extend(keys), self._extend(values)

    def _extend(self, x: torch.Tensor) -> torch.Tensor:
        _, heads, _, head_dim = x.shape
        whole = torch.cat((self._states.take(heads, self._num_kept, head_dim), x), dim=2)
        self._states.keep(whole, self._num_kept, dim=-2)
        return whole

    def mask(self, device: torch.device) -> torch.Tensor:
        """`[B, 1, L, window - 1 + L]` bool: the keys that a position attends to; none before the request's start."""
        length = max(self._states.num_frames)
        queries = torch.arange(length, device=device)[:, None]
        keys = torch.arange(self._num_kept + length, device=device)
        before = torch.tensor(self._states.num_before, device=device)
        first = (self._num_kept - before).clamp_min(0)[:, None, None, None]
        return (keys >= queries) & (keys <= queries + self._num_kept) & (keys >= first)

    def positions(self, device: torch.device) -> torch.Tensor:
        """`[B, L]` int64, counted from the request's start."""
        before = torch.tensor(self._states.num_before, device=device)
        return before[:, None] + torch.arange(max(self._states.num_frames), device=device)
