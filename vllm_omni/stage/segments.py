# SPDX-License-Identifier: Apache-2.0
"""When a stage sends output of a running request, in segments.

Each streaming consumer has a `Reader`, which decides when a segment is due; it is sent to all of them as soon as it is
due for one.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from vllm_omni.config.stage_config import SENTENCES, SegmentConfig, WindowConfig
from vllm_omni.outputs import Completion, StageOutput, StreamShapes, merge_stage_outputs, stream_dim
from vllm_omni.stage.window import WindowSizes, make_cutter


class Reader(ABC):
    """The flush policy of a streaming consumer."""

    @abstractmethod
    def add(self, piece: StageOutput) -> bool:
        """Counts the next piece. Whether all held pieces must be sent now."""

    @property
    def due(self) -> float | None:
        """When held pieces must be sent, in seconds on the clock; None: no time limit."""
        return None

    def flushed(self) -> None:  # noqa: B027 (optional)
        """All held pieces were sent."""


class CallerReader(Reader):
    """The pipeline's caller: due after a number of tokens, or with the first token after an interval. The very first
    token is sent at once.

    Held tokens wait for the next one up to a second interval. So segments are sent at the ends of steps, those of
    several requests together, and timers of single requests do not interrupt the steps.
    """

    def __init__(self, config: SegmentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: Seconds.
        """
        self._config = config
        self._interval = config.min_flush_interval_ms / 1000
        self._clock = clock
        self._num_tokens = 0
        self._last_flush = float("-inf")

    def add(self, piece: StageOutput) -> bool:
        self._num_tokens += sum(len(completion.token_ids) for completion in piece.completions)
        is_long_ago = self._clock() >= self._last_flush + self._interval
        return self._num_tokens >= self._config.max_segment_tokens or is_long_ago

    @property
    def due(self) -> float:
        return self._last_flush + 2 * self._interval

    def flushed(self) -> None:
        self._num_tokens, self._last_flush = 0, self._clock()


class WindowReader(Reader):
    """A stage that reads in windows: due when the next window is complete. Pieces that were sent early still count."""

    def __init__(self, config: WindowConfig) -> None:
        self._count = _make_counter(config)
        self._sizes = WindowSizes(config)
        self._num_missing = self._sizes.current

    def add(self, piece: StageOutput) -> bool:
        self._num_missing -= self._count(piece)
        is_due = self._num_missing <= 0
        while self._num_missing <= 0:
            self._sizes.advance()
            self._num_missing += self._sizes.current
        return is_due


def _make_counter(config: WindowConfig) -> Callable[[StageOutput], int]:
    """Counts the units that each piece of a stream completes."""
    if config.unit == "tokens":
        return lambda piece: len(_first_of(piece).token_ids)
    if config.unit == SENTENCES:
        cutter = make_cutter(config)
        return lambda piece: len(cutter.add(_first_of(piece).text))
    return lambda piece: _num_rows(piece, config.unit)


def _first_of(piece: StageOutput) -> Completion:
    return piece.first_completion or Completion()


def _num_rows(piece: StageOutput, name: str) -> int:
    rows = piece.tensors.get(name)
    return 0 if rows is None else rows.shape[stream_dim(name)]


class Segmenter:
    """One request's output: in segments for streaming consumers, whole for the others."""

    def __init__(
        self,
        readers: Sequence[Reader] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """
        Args:
            readers: One for each streaming consumer; without any, every piece is sent at once.
            clock: Seconds.
            keeps_whole: A consumer reads it whole.
        """
        self._readers = readers
        self._clock = clock
        self._keeps_whole = keeps_whole
        self._pieces: list[StageOutput] = []  # held for the next segment
        self._segments: list[StageOutput] = []
        self._shapes = StreamShapes()

    @property
    def due(self) -> float | None:
        """When held pieces must be sent, on the clock; None while nothing is held, or without a time limit."""
        if not self._pieces:
            return None
        times = [reader.due for reader in self._readers]
        return min((due for due in times if due is not None), default=None)

    def add(self, piece: StageOutput) -> StageOutput | None:
        """Adds a piece; returns a segment if one is due.

        Raises:
            ValueError: It cannot be joined to those before.
        """
        self._shapes.check(piece)
        self._pieces.append(piece)
        is_due = [reader.add(piece) for reader in self._readers]
        return self._flush() if any(is_due) or not self._readers or piece.step is not None else None

    def flush_if_due(self) -> StageOutput | None:
        due = self.due
        return self._flush() if due is not None and self._clock() >= due else None

    def finish(self, piece: StageOutput) -> tuple[StageOutput, StageOutput]:
        """Adds the last piece; returns the last segment, and the whole output (without `keeps_whole` the segment).

        Raises as `add`.
        """
        self._shapes.check(piece)
        segment = merge_stage_outputs([*self._pieces, piece])
        segment.is_last = True
        return segment, merge_stage_outputs([*self._segments, segment])

    def _flush(self) -> StageOutput:
        segment = merge_stage_outputs(self._pieces)
        segment.is_last = False
        self._pieces = []
        for reader in self._readers:
            reader.flushed()
        if self._keeps_whole and segment.step is None:  # Progress reports are not part of the output.
            self._segments.append(segment)
        return segment
