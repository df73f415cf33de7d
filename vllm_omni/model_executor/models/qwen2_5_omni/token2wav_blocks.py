# SPDX-License-Identifier: Apache-2.0
"""The layout of many requests' spectrograms in blocks, the unit of the DiT's attention.

A frame attends to its own block of frames and, in some layers, to the block before or after it. So requests of any
lengths run as one list of blocks: padding only in a request's last block, and a cost linear in length. This file knows
no weights.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one request.

    Attributes:
        num_frames: Frames of the run; only its last block can be incomplete.
        first_block: Blocks of the request that were computed before.
        has_past: The keys and values of the block before the run are available.
        kept_block: Index in the run of the block whose keys and values the next run needs, or None.
    """

    num_frames: int
    first_block: int = 0
    has_past: bool = False
    kept_block: int | None = None


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a batch of runs, one run after the other; before a run with a past there is a past block.

    Attributes:
        runs: In the order of the batch.
        block_size: Frames of a block.
        device: Of the tensors made here.
    """

    runs: list[BlockRun]
    block_size: int
    device: torch.device

    @cached_property
    def sizes(self) -> list[int]:
        """Blocks of each run, without its past."""
        return [-(-run.num_frames // self.block_size) for run in self.runs]

    @cached_property
    def starts(self) -> list[int]:
        """The first block of each run, after its past."""
        ends = accumulate(run.has_past + size for run, size in zip(self.runs, self.sizes, strict=True))
        return [end - size for end, size in zip(ends, self.sizes, strict=True)]

    @cached_property
    def num_blocks(self) -> int:
        return self.starts[-1] + self.sizes[-1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """`[rows]` int64, each frame's position in its request."""
        positions = torch.zeros(self.num_blocks, self.block_size, dtype=torch.int64)
        for run, start, size in zip(self.runs, self.starts, self.sizes, strict=True):
            first, stop = run.first_block * self.block_size, (run.first_block + size) * self.block_size
            positions[start : start + size] = torch.arange(first, stop).view(size, -1)
        return positions.flatten().to(self.device)

    @cached_property
    def past_blocks(self) -> torch.Tensor:
        """`[runs with a past]` int64, the indices of their past blocks."""
        pairs = zip(self.runs, self.starts, strict=True)
        return self._as_index([start - 1 for run, start in pairs if run.has_past])

    @cached_property
    def kept_blocks(self) -> torch.Tensor:
        """`[runs that keep one]` int64, the blocks whose keys and values are kept."""
        pairs = zip(self.runs, self.starts, strict=True)
        return self._as_index([start + run.kept_block for run, start in pairs if run.kept_block is not None])

    def pack(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """`[frames, width]` of each run -> `[rows, width]`, zeros without a frame."""
        packed = rows[0].new_zeros(self.num_blocks * self.block_size, rows[0].shape[1])
        for part, start in zip(rows, self.starts, strict=True):
            packed[start * self.block_size :][: part.shape[0]] = part
        return packed

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """`[rows, width]` -> `[frames, width]` of each run."""
        pairs = zip(self.runs, self.starts, strict=True)
        return [packed[start * self.block_size :][: run.num_frames] for run, start in pairs]

    def visible(self, backward: int, ahead: int) -> torch.Tensor:
        """`[blocks, (backward + 1 + ahead) * block_size]` bool: the frames that each block attends to.

        They are those of the blocks from `backward` before to `ahead` after it (0 or 1 each) that belong to its run.
        """
        visible = torch.zeros(self.num_blocks, backward + 1 + ahead, self.block_size, dtype=torch.bool)
        for run, start, size in zip(self.runs, self.starts, self.sizes, strict=True):
            frames = torch.zeros(size + 2, self.block_size, dtype=torch.bool)
            frames[0] = run.has_past
            frames[1:].flatten()[: run.num_frames] = True
            windows = frames[1 - backward :].unfold(0, backward + 1 + ahead, 1)[:size]  # [size, block_size, seen]
            visible[start : start + size] = windows.transpose(1, 2)
        # Their results are not read, but a row without any visible frame would be NaN.
        visible[self.past_blocks.cpu(), backward] = True
        return visible.flatten(1).to(self.device)

    def _as_index(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)
