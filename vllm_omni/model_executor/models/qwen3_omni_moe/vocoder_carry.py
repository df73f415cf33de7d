# SPDX-License-Identifier: Apache-2.0
"""What the vocoder's causal layers carry from one window of a stream to the next, for the rows of one batch.

All that a causal layer can know of earlier windows is its last few inputs. With them in front of its next inputs it
computes what it would have computed in one pass over everything, and computes nothing twice. A stream's inputs of all
layers are one flat vector, its *state*; that of a stream which has not begun is zeros, which is what the layers are
padded with at the start. Rows of a batch differ in length: on the right of a row's own positions is padding, which no
causal layer sees.

This file knows no layer: they take their part of the state in the order in which they run.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch


class Carry:
    """The states of a batch's rows, taken apart by the layers and put together anew.

    Attributes:
        num_frames: Frames of each row in this batch.
        num_before: Frames of each row's stream before it.
    """

    def __init__(
        self, states: torch.Tensor, num_frames: Sequence[int], num_before: Sequence[int], is_kept: bool = True
    ) -> None:
        """
        Args:
            states: `[B, size]`; zeros where `num_before` is 0.
            is_kept: False where no row goes on after this batch: nothing is kept then.
        """
        self.num_frames = num_frames
        self.num_before = num_before
        self._states = states
        self._taken = 0
        self._is_kept = is_kept
        self._kept: list[torch.Tensor] = []
        self._lengths = torch.tensor(num_frames, device=states.device)
        fresh = [row for row, before in enumerate(num_before) if not before]
        self._is_all_fresh = len(fresh) == len(num_before)
        is_even = len(set(num_frames)) == 1 and (self._is_all_fresh or not fresh)
        self._even_length = num_frames[0] if is_even else None
        self._fresh = torch.tensor(fresh, dtype=torch.int64, device=states.device)

    def take(self, *shape: int) -> torch.Tensor:
        """`[B, *shape]`, the next part of the states. Not to be written to."""
        start = self._taken
        self._taken += int(torch.Size(shape).numel())
        return self._states[:, start : self._taken].view(-1, *shape)

    def keep(self, whole: torch.Tensor, num_taken: int, dim: Literal[-1, -2] = -1) -> None:
        """Leaves the last inputs of a layer for the next window.

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
        """From here on each position is `factor` positions."""
        self._lengths = self._lengths * factor
        if self._even_length is not None:
            self._even_length *= factor

    def drop_beginning(self, x: torch.Tensor, num_positions: int) -> torch.Tensor:
        """`[B, C, L]` without the first positions of the rows whose streams begin here.

        Returns:
            Where some rows do and some do not: the same tensor, changed, still of length L.
        """
        if not len(self._fresh):
            return x
        self._lengths = self._lengths.index_add(0, self._fresh, torch.full_like(self._fresh, -num_positions))
        if not self._is_all_fresh:
            x[self._fresh, :, :-num_positions] = x[self._fresh, :, num_positions:]
            return x
        if self._even_length is not None:
            self._even_length -= num_positions
        return x[..., num_positions:]

    def new_states(self) -> torch.Tensor:
        """`[B, size]`, after all layers have run."""
        assert self._taken == self._states.shape[1], f"{self._taken} of {self._states.shape[1]} values were taken"
        return torch.cat(self._kept, dim=1)


class CarriedKeys:
    """Stands in for HF transformers' cache of keys and values, of which its attention calls `update` only."""

    def __init__(self, carry: Carry, window: int) -> None:
        """
        Args:
            window: Positions that a position sees, itself included.
        """
        self._carry = carry
        self._num_kept = window - 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, heads, L, head_dim]` each -> the same with the `window - 1` positions before them."""
        return self._extend(keys), self._extend(values)

    def _extend(self, x: torch.Tensor) -> torch.Tensor:
        _, heads, _, head_dim = x.shape
        whole = torch.cat((self._carry.take(heads, self._num_kept, head_dim), x), dim=2)
        self._carry.keep(whole, self._num_kept, dim=-2)
        return whole

    def mask(self, device: torch.device) -> torch.Tensor:
        """`[B, 1, L, window - 1 + L]` bool: which keys a position sees. Those before the stream's begin are not any."""
        length = max(self._carry.num_frames)
        queries = torch.arange(length, device=device)[:, None]
        keys = torch.arange(self._num_kept + length, device=device)
        before = torch.tensor(self._carry.num_before, device=device)
        first = (self._num_kept - before).clamp_min(0)[:, None, None, None]
        return (keys >= queries) & (keys <= queries + self._num_kept) & (keys >= first)

    def positions(self, device: torch.device) -> torch.Tensor:
        """`[B, L]` int64, counted from the stream's begin."""
        before = torch.tensor(self._carry.num_before, device=device)
        return before[:, None] + torch.arange(max(self._carry.num_frames), device=device)
