# SPDX-License-Identifier: Apache-2.0
"""The rows of tokens in vLLM's prefix cache: a stage hands on the rows of its whole prompt, computed or not.

vLLM caches full blocks of keys and values under hashes of their tokens, media and adapter. The rows of a block are kept
under the same hash, on the CPU. A block whose rows are gone counts as not cached.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

Rows = dict[str, torch.Tensor]
"""Outputs of a model by name, `[tokens, ...]` each, on the CPU."""


class RowCache:
    """The rows of full blocks; the least recently used are removed first.

    Args:
        block_size: Tokens in a block.
        max_blocks: As many as the KV cache has.
        max_bytes: Of all rows.
    """

    def __init__(self, block_size: int, max_blocks: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.num_bytes = 0
        self._max_blocks, self._max_bytes = max_blocks, max_bytes
        self._blocks: OrderedDict[Hashable, Rows] = OrderedDict()

    def count(self, hashes: Sequence[Hashable]) -> int:
        """How many of these blocks, from the first, are there."""
        return next((index for index, key in enumerate(hashes) if key not in self._blocks), len(hashes))

    def read(self, hashes: Sequence[Hashable], num_tokens: int) -> Rows:
        """The rows of so many tokens of these blocks, which are there, in memory of their own."""
        used = hashes[: -(-num_tokens // self.block_size)]
        for key in reversed(used):  # The end of a prompt is removed before its beginning.
            self._blocks.move_to_end(key)
        blocks = [self._blocks[key] for key in used]
        return {name: torch.cat([block[name] for block in blocks])[:num_tokens] for name in blocks[0]}

    def add(self, key: Hashable, rows: Rows) -> None:
        """Keeps a copy of the rows of a block."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return
        self._blocks[key] = {name: tensor.clone() for name, tensor in rows.items()}
        self.num_bytes += _num_bytes(rows)
        while self.num_bytes > self._max_bytes or len(self._blocks) > self._max_blocks:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest)

    def clear(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0


@dataclass
class RequestRows:
    """What a request has of the rows of its tokens, from its first step on.

    Attributes:
        found: Rows of the tokens that were found in the cache, until the request's first rows leave.
        num_found: Of those tokens.
        is_complete: All rows so far are known, so that blocks can be kept.
    """

    found: Rows = field(default_factory=dict)
    num_found: int = 0
    is_complete: bool = True
    _num_kept: int = 0
    _since: list[Rows] = field(default_factory=list)

    def leave(self, rows: Rows, num_tokens: int) -> Rows:
        """The rows that leave with a step: computed ones, after those that were found.

        Args:
            num_tokens: Of the request before the step's own.
        """
        if self.found:
            rows = {name: torch.cat((self.found[name], tensor)) for name, tensor in rows.items()}
            self.found = {}
        self._since.append(rows)
        self.is_complete = self.is_complete and self._num_rows == num_tokens
        return rows

    @property
    def _num_rows(self) -> int:
        """Rows that have left so far."""
        return self._num_kept + sum(map(_num_rows, self._since))

    def keep_blocks(self, cache: RowCache, hashes: Sequence[Hashable]) -> None:
        """Adds the blocks that are full now.

        Args:
            hashes: Of the request's full blocks.
        """
        if not self.is_complete:
            self._since.clear()
            return
        size = cache.block_size
        stop = min(self._num_rows // size, len(hashes))
        if stop * size <= self._num_kept:
            return
        rows = {name: torch.cat([each[name] for each in self._since]) for name in self._since[0]}
        for index in range(self._num_kept // size, stop):
            first = index * size - self._num_kept
            cache.add(hashes[index], {name: tensor[first : first + size] for name, tensor in rows.items()})
        self._since = [{name: tensor[stop * size - self._num_kept :].clone() for name, tensor in rows.items()}]
        self._num_kept = stop * size


def _num_rows(rows: Rows) -> int:
    """-1 if the outputs have different numbers of rows."""
    lengths = {len(tensor) for tensor in rows.values()}
    return lengths.pop() if len(lengths) == 1 else -1


def _num_bytes(rows: Rows) -> int:
    return sum(tensor.nbytes for tensor in rows.values())
