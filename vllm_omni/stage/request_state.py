# SPDX-License-Identifier: Apache-2.0
"""The state of one request in a stage: the input that has arrived, the output that was sent."""

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.messages import SubmitMessage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import StreamChunk
from vllm_omni.stage.segments import Segmenter
from vllm_omni.stage.spoken_reply import SpokenReply
from vllm_omni.stage.window import WindowState


class InputStreams:
    """Joins the streams of a request's sources into calls of the stage input processor.

    A source that is not cut into windows is in every call, and no call is made before it is complete. Every other
    source adds its next window to each call, while there is one: the call waits for the slowest source.
    """

    def __init__(self, windows: Mapping[int, WindowConfig]) -> None:
        self._states = {source: WindowState(config) for source, config in windows.items()}
        self._windows: dict[int, deque[StageOutput]] = {s: deque() for s, c in windows.items() if c.streams}
        self._whole: dict[int, StageOutput] = {}
        self._is_done = False

    def add(self, source: int, piece: StageOutput) -> int:
        """Adds a piece; returns the number of windows that it completed."""
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
        """Whether `next_call` can be called."""
        if self._is_done or len(self._whole) < len(self._states) - len(self._windows):
            return False
        open_sources = [s for s, queue in self._windows.items() if queue or not self.has_ended(s)]
        return all(self._windows[source] for source in open_sources)

    def next_call(self) -> tuple[dict[int, StageOutput], bool]:
        """The sources of the next call, and whether it is the last."""
        sources = dict(self._whole)
        for source, queue in self._windows.items():
            if queue:
                sources[source] = queue.popleft()
        self._is_done = all(not queue and self.has_ended(source) for source, queue in self._windows.items())
        return sources, self._is_done


class Phase(enum.IntEnum):
    """A phase of a request in a stage, in their order; it may skip to the end from any."""

    NEEDS_INPUT = enum.auto()
    """The request's sources have not made its first input."""
    QUEUED = enum.auto()
    """It waits for a place in the engine."""
    STARTED = enum.auto()
    """It has a place in the engine, which has not been given any input: the stage input processor made none of it."""
    IN_ENGINE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class RequestState:
    """A request that runs in this stage, or waits for its inputs.

    Attributes:
        phase: Changed by `enter` only.
        num_received, num_sent: Pieces received from each source, and sent to each target.
        pending_refunds: Sources, requests and bytes to refund when the request leaves the queue.
        more_input: Of its prompt, for the engine when it has the request.
        reply: Of a stage that speaks a part of a reply: finds that part.
    """

    submit: SubmitMessage
    request: StageRequest
    inputs: InputStreams
    outputs: Segmenter
    metrics: StageMetrics
    phase: Phase = Phase.NEEDS_INPUT
    num_received: dict[int, int] = field(default_factory=dict)
    num_sent: dict[int, int] = field(default_factory=dict)
    pending_refunds: list[tuple[int, int, int]] = field(default_factory=list)  # (source, requests, bytes)
    more_input: list[StreamChunk] = field(default_factory=list)
    reply: SpokenReply | None = None

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def has_place(self) -> bool:
        """Whether it has a place in the engine."""
        return Phase.QUEUED < self.phase < Phase.ENDED

    def enter(self, phase: Phase) -> Phase:
        """Enters the next phase, or the last; returns the one before."""
        before = self.phase
        assert phase == before + 1 or phase is Phase.ENDED > before, f"{before.name} to {phase.name}"
        self.phase = phase
        return before
