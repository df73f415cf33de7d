# SPDX-License-Identifier: Apache-2.0
"""What a stage's shell remembers of one request: what has arrived of its input, what has left of its output."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.messages import SubmitMessage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import StageOutput, merge_stage_outputs
from vllm_omni.stage.segments import Segmenter
from vllm_omni.stage.window import WindowState


@dataclass(slots=True)
class InputCall:
    """The sources of one call of the stage input processor."""

    sources: dict[int, StageOutput]
    is_last: bool


class InputStreams:
    """Joins the streams of a request's sources into calls of the stage input processor.

    A source that is handed over whole is in every call, and none is made without it. Of every other one each call has
    the next window, as long as there is one: the call waits for the slowest.
    """

    def __init__(self, windows: Mapping[int, WindowConfig]) -> None:
        self._states = {source: WindowState(config) for source, config in windows.items()}
        self._windows: dict[int, deque[StageOutput]] = {s: deque() for s, c in windows.items() if c.streams}
        self._whole: dict[int, StageOutput] = {}
        self._is_done = False

    def add(self, source: int, piece: StageOutput) -> int:
        """Takes in a piece; returns the number of windows that it completed."""
        windows = self._states[source].add(piece)
        if source in self._windows:
            self._windows[source].extend(windows)
        elif windows:
            self._whole[source] = windows[0]
        return len(windows)

    def has_ended(self, source: int) -> bool:
        """Whether all of the source's output has arrived."""
        return self._states[source].has_ended

    @property
    def is_ready(self) -> bool:
        """Whether `next_call` has something to give."""
        if self._is_done or len(self._whole) < len(self._states) - len(self._windows):
            return False
        open_sources = [s for s, queue in self._windows.items() if queue or not self.has_ended(s)]
        return all(self._windows[source] for source in open_sources)

    def next_call(self) -> InputCall:
        sources = dict(self._whole)
        for source, queue in self._windows.items():
            if queue:
                sources[source] = queue.popleft()
        self._is_done = all(not queue and self.has_ended(source) for source, queue in self._windows.items())
        return InputCall(sources, self._is_done)


class OutputStream:
    """One request's output on its way out: in segments to those who read along, whole to the others."""

    def __init__(self, segmenter: Segmenter, keeps_whole: bool) -> None:
        """
        Args:
            keeps_whole: Somebody reads it whole.
        """
        self._segmenter = segmenter
        self._keeps_whole = keeps_whole
        self._segments: list[StageOutput] = []

    @property
    def due(self) -> float | None:
        """When a segment must go (`time.monotonic()`), whatever else happens."""
        return self._segmenter.due

    def add(self, piece: StageOutput) -> StageOutput | None:
        """Takes in a piece of output; returns a segment if one is due."""
        return self._keep(self._segmenter.add(piece))

    def flush_if_due(self) -> StageOutput | None:
        return self._keep(self._segmenter.flush_if_due())

    def finish(self, piece: StageOutput) -> tuple[StageOutput, StageOutput]:
        """Takes in the last piece; returns the last segment, and the whole (where it is kept, else the same)."""
        segment = self._segmenter.finish(piece)
        return segment, merge_stage_outputs([*self._segments, segment])

    def _keep(self, segment: StageOutput | None) -> StageOutput | None:
        # How far a stage has come is no part of the whole.
        if segment is not None and segment.step is None and self._keeps_whole:
            self._segments.append(segment)
        return segment


@dataclass(slots=True)
class RequestState:
    """A request that this stage works on, or waits for the inputs of.

    Attributes:
        streamed_to: Targets that have been sent a part of the output.
        num_received, num_sent: Pieces that have come from each source, and gone to each target.
        owed: Feeders, requests and bytes to give back when the request does not wait any more.
    """

    submit: SubmitMessage
    request: StageRequest
    inputs: InputStreams
    outputs: OutputStream
    metrics: StageMetrics
    is_queued: bool = False
    is_running: bool = False
    is_in_engine: bool = False
    num_received: dict[int, int] = field(default_factory=dict)
    num_sent: dict[int, int] = field(default_factory=dict)
    owed: list[tuple[int, int, int]] = field(default_factory=list)  # (feeder, requests, bytes)

    @property
    def request_id(self) -> str:
        return self.submit.request_id
