# SPDX-License-Identifier: Apache-2.0
"""When a stage passes on what its engine has made so far (design document 002, section 6)."""

import time
from collections.abc import Callable

from vllm_omni.config.stage_config import SegmentConfig
from vllm_omni.outputs import StageOutput, merge_stage_outputs


class Segmenter:
    """Gathers the pieces of one request's output into segments."""

    def __init__(self, config: SegmentConfig | None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            config: None passes every piece on at once.
            clock: Seconds.
        """
        self._config = config
        self._clock = clock
        self._pieces: list[StageOutput] = []
        self._num_tokens = 0
        self._last_flush = float("-inf")

    @property
    def due(self) -> float | None:
        """When the pieces held must go, on the clock; None while nothing is held."""
        if not self._pieces or self._config is None:
            return None
        return self._last_flush + self._config.min_flush_interval_ms / 1000

    def add(self, piece: StageOutput) -> StageOutput | None:
        """Takes in a piece; returns a segment if one is due."""
        self._pieces.append(piece)
        self._num_tokens += sum(len(completion.token_ids) for completion in piece.completions)
        return self._flush() if self._is_due(piece) else None

    def flush_if_due(self) -> StageOutput | None:
        due = self.due
        return self._flush() if due is not None and self._clock() >= due else None

    def finish(self, piece: StageOutput) -> StageOutput:
        """The last segment: the last piece and what was held before it."""
        self._pieces.append(piece)
        segment = self._flush()
        segment.is_last = True
        return segment

    def _is_due(self, piece: StageOutput) -> bool:
        due = self.due
        if self._config is None or due is None or piece.step is not None:
            return True
        return self._num_tokens >= self._config.max_segment_tokens or self._clock() >= due

    def _flush(self) -> StageOutput:
        segment = merge_stage_outputs(self._pieces)
        segment.is_last = False
        self._pieces, self._num_tokens, self._last_flush = [], 0, self._clock()
        return segment
