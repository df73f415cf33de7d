# SPDX-License-Identifier: Apache-2.0
"""Frames whose codebooks are delayed: a step predicts one code of each codebook, of frames that follow each other.

In row t of such a model codebook k has the code of frame t - k. So all codes of a row come from one hidden state,
without a depth decoder, and each codebook still sees those before it of the same frame. Rows before a codebook's first
code have a start id there, rows after its last one an end id. The input of the next step is the row.

Reference: `HiggsAudioV2DelayPatternLogitsProcessor` and `HiggsAudioV2GenerationMixin` of HF transformers. This file
knows no model and no runner.
"""

from typing import NamedTuple

import torch
from torch import nn
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_omni.model_executor.feedback import FedBackRows
from vllm_omni.model_executor.feedback_buffers import with_room_for
from vllm_omni.model_executor.layers.frame_loop import FrameMemory
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter, ResidualSampling

MAX_REPEAT_WINDOW = 16
"""Rows in which repeated codes are counted, at most."""

_NEVER = 1 << 40


class DelayPattern(NamedTuple):
    """
    Attributes:
        num_codes: Codebooks.
        start_id, end_id: In a row: what a codebook has before its first code, and after its last one.
    """

    num_codes: int
    start_id: int
    end_id: int

    def num_rows(self, num_frames: int) -> int:
        """Rows of a whole sound: its frames, one of start ids and one of end ids, delayed."""
        return num_frames + self.num_codes + 1

    def delay(self, frames: torch.Tensor) -> torch.Tensor:
        """`[frames, num_codes]`, those of a whole sound, -> `[num_rows(frames), num_codes]`."""
        start = frames.new_full((self.num_codes, self.num_codes), self.start_id)
        end = frames.new_full((self.num_codes, self.num_codes), self.end_id)
        padded = torch.cat((start, frames, end))
        first, size = self.num_codes - 1, self.num_rows(len(frames))
        return torch.stack([padded[first - k : first - k + size, k] for k in range(self.num_codes)], dim=1)

    def undelay(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, num_codes]` -> `[rows - num_codes + 1, num_codes]`, the frames that are complete in these rows."""
        size = max(len(rows) - self.num_codes + 1, 0)
        return torch.stack([rows[k : k + size, k] for k in range(self.num_codes)], dim=1)


class DelayedFrames(FrameMemory):
    """Makes the rows of requests: see `FrameMemory`. The first code of a row is the token that its request has sampled,
    unless the pattern says what it is.

    A row of start ids is the first of each request. When any codebook has sampled its end, the ends of all follow, one
    codebook in each row; a row of end ids is the last.

    Of a request that samples, with `ras_win_len` and `ras_win_max_num_repeat` in `extra_args`, a code that its codebook
    had at least that often in so many rows is drawn again, of the 50 likeliest at temperature 1 (repetition-aware
    sampling).
    """

    def __init__(self, heads: nn.Linear, pattern: DelayPattern, max_batch_size: int, max_frames: int) -> None:
        """
        Args:
            heads: hidden -> `num_codes * vocab`, those of all codebooks one after the other.
            max_batch_size, max_frames: As in `FrameMemory`.
        """
        num_codes = pattern.num_codes
        super().__init__(num_codes, 2 * num_codes - 1, heads.weight.data, max_batch_size, max_frames)
        self._heads = heads
        self._pattern = pattern
        self._codebooks = torch.arange(num_codes, device=heads.weight.device)
        self._ages = torch.arange(1, MAX_REPEAT_WINDOW + 1, device=heads.weight.device)
        self._ends = self._codebooks.new_full((max_batch_size,), _NEVER)  # the first row with an end id
        self._limits = self._codebooks.new_zeros(max_batch_size, 2)  # rows, and repeated codes in them
        self._limited: set[int] = set()
        self._no_filter = torch.tensor(ResidualFilter(), device=heads.weight.device)

    def begin(self, slot: int, params: SamplingParams, residual: ResidualFilter) -> None:
        limits = read_repeat_limits(params)
        super().begin(slot, params, residual)
        self._ends = with_room_for(self._ends, slot)
        self._limits = with_room_for(self._limits, slot)
        self._ends[slot] = _NEVER
        self._limits[slot] = torch.tensor(limits or (0, _NEVER))
        if limits:
            self._limited.add(slot)

    def end(self, slot: int) -> None:
        super().end(slot)
        self._limited.discard(slot)

    def make(self, rows: FedBackRows) -> torch.Tensor:
        """Makes the next row of each request, `[N, num_codes]` int64."""
        logits = self._heads(self._last_hidden[rows.slots]).unflatten(-1, (self._pattern.num_codes, -1))
        sampling = self._sampler.draw(rows.slots)
        residual = self._pattern.num_codes - 1
        if sampling is None:
            sampled = logits[:, 1:].argmax(-1)
        else:
            sampled = ResidualSampling(sampling.filters, sampling.noise[:, :residual]).sample_all(logits[:, 1:])
        codes = self._with_pattern(torch.cat((rows.token_ids[:, None], sampled), dim=1), rows)
        if sampling is not None and self._limited:
            filters = self._no_filter.expand(len(codes), -1)
            drawn = ResidualSampling(filters, sampling.noise[:, residual:]).sample_all(logits)
            codes = torch.where(self._is_repeated(codes, rows), drawn, codes)
        self._codes.write(rows.slots, rows.frames, codes)
        ends = torch.where((codes == self._pattern.end_id).any(1), rows.frames, _NEVER)
        self._ends[rows.slots] = torch.minimum(self._ends[rows.slots], ends)
        return codes

    def read(self, rows: FedBackRows) -> torch.Tensor:
        """What `make` returned for these rows."""
        return self._codes.read(rows.slots, rows.frames)

    def _with_pattern(self, codes: torch.Tensor, rows: FedBackRows) -> torch.Tensor:
        """The codes with the ids that the pattern has, `[N, num_codes]`."""
        index = rows.frames[:, None]
        codes = torch.where(self._codebooks >= index, self._pattern.start_id, codes)
        return torch.where(self._codebooks < index - self._ends[rows.slots][:, None], self._pattern.end_id, codes)

    def _is_repeated(self, codes: torch.Tensor, rows: FedBackRows) -> torch.Tensor:
        """`[N, num_codes]` bool."""
        window, most = self._limits[rows.slots].unbind(1)
        index = rows.frames[:, None] - self._ages  # [N, ages]
        slots = rows.slots[:, None].expand_as(index)
        before = self._codes.read(slots.flatten(), index.clamp_min(0).flatten()).unflatten(0, index.shape)
        is_counted = ((index >= 0) & (self._ages <= window[:, None]))[..., None] & (before < self._pattern.start_id)
        return ((before == codes[:, None]) & is_counted).sum(1) >= most[:, None]


def read_repeat_limits(params: SamplingParams) -> tuple[int, int] | None:
    """`ras_win_len` and `ras_win_max_num_repeat` of a request that samples; None for any other.

    Raises:
        ValueError: One is out of range.
    """
    given = params.extra_args or {}
    window, most = given.get("ras_win_len"), given.get("ras_win_max_num_repeat")
    if params.sampling_type == SamplingType.GREEDY or window is None or most is None:
        return None
    if not (isinstance(window, int) and 0 < window <= MAX_REPEAT_WINDOW and isinstance(most, int) and most > 0):
        raise ValueError(f"ras_win_len is 1 to {MAX_REPEAT_WINDOW}, and ras_win_max_num_repeat at least 1")
    return window, most
