# SPDX-License-Identifier: Apache-2.0
"""Observers of a pipeline: the orchestrator calls them as requests start and end and as stages send statistics.

`entrypoints.pipeline.make_observers` makes the configured ones. They run on the orchestrator's thread and must not
block. Exporters run third-party code, so the `CompositeObserver` logs an observer's exception and does not raise it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.metrics.logs import get_logger
from vllm_omni.metrics.stats import (
    COMPLETED,
    CacheCounts,
    MetricFamily,
    SpeculationCounts,
    StageHealth,
    StageMetrics,
    StageStats,
)

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class RequestSummary:
    """Metrics of one request. Times are `time.monotonic()` seconds.

    Attributes:
        arrival, ended: When it was submitted, and when its terminal event was made.
        outcome: `completed`, or the name of the error's class, e.g. `RequestTimeoutError`.
        failed_stage: Name of the stage that failed it; None where no stage did.
        stages: Metrics of each stage that finished it, in stage order.
        first_text, first_audio: When the first piece of text and of audio reached the orchestrator; None if none did.
        first_image: When the first preview, image or video did.
        num_text_tokens: Tokens of the text in the final outputs.
        audio_seconds: Length of the audio in the final outputs.
        num_images: Images and videos in the final outputs.
        text_stage_id: The final stage that wrote the text; None without text.
    """

    request_id: str
    arrival: float
    ended: float
    outcome: str = COMPLETED
    failed_stage: str | None = None
    stages: list[StageMetrics] = field(default_factory=list)
    first_text: float | None = None
    first_audio: float | None = None
    first_image: float | None = None
    num_text_tokens: int = 0
    audio_seconds: float = 0.0
    num_images: int = 0
    text_stage_id: int | None = None

    @property
    def seconds(self) -> float:
        """Completion time: from submission to the terminal event."""
        return self.ended - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first piece of text; to the whole text where it is not streamed."""
        return None if self.first_text is None else self.first_text - self.arrival

    @property
    def ttfa(self) -> float | None:
        """Seconds from submission to the first piece of audio; to all of it where it is not streamed."""
        return None if self.first_audio is None else self.first_audio - self.arrival

    @property
    def ttfi(self) -> float | None:
        """Seconds from submission to the first preview; to the image or video itself without previews."""
        return None if self.first_image is None else self.first_image - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token of the text after the first one, in the stage that wrote it.

        Without streaming the stage does not record the time of the first token: then the mean over all tokens, from
        the stage's start.
        """
        stage = next((stage for stage in self.stages if stage.stage_id == self.text_stage_id), None)
        if stage is None:
            return None
        if stage.first_output is None:
            since, num_tokens = stage.started, stage.num_output_tokens
        else:
            since, num_tokens = stage.first_output, stage.num_output_tokens - 1
        return (stage.finished - since) / num_tokens if num_tokens > 0 else None

    @property
    def real_time_factor(self) -> float | None:
        """Completion time divided by the length of the audio; below 1 it is generated faster than it plays."""
        return self.seconds / self.audio_seconds if self.audio_seconds > 0 else None


class PipelineObserver:
    """Base class: ignores everything."""

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """A request was submitted.

        Args:
            modalities: The requested outputs.
            trace_headers: W3C trace context of the caller, if any.

        Returns:
            The trace context for the stages (`StageRequest.trace_headers`); empty without tracing.
        """
        return {}

    def request_ended(self, summary: RequestSummary) -> None:
        """A started request has its terminal event. Called once for each."""

    def stage_stats(self, stats: StageStats) -> None:
        """A stage sent its statistics."""

    def engine_metrics(self, stage_id: int, replica: int, families: list[MetricFamily]) -> None:
        """A stage sent the metrics of its engine."""

    def watch_health(self, read: Callable[[], Sequence[StageHealth]]) -> None:
        """The pipeline has been made; `read` returns the state of each replica. Of any thread, called once, at most."""

    def watch_media_cache(self, read: Callable[[], CacheCounts]) -> None:
        """The caller caches preprocessed media; `read` may be called from any thread. Called once, at most."""

    def watch_pause(self, read: Callable[[], bool]) -> None:
        """`read` tells whether generation is paused; of any thread. Called once, at most."""

    def watch_speculations(self, counts: SpeculationCounts) -> None:
        """The pipeline is served; `counts` go on changing. Called once, at most."""

    def close(self) -> None:
        """The pipeline is closed. This is the last call."""


class CompositeObserver(PipelineObserver):
    """Calls several observers. Raises nothing: a failure is logged once for each method of an observer."""

    def __init__(self, observers: Sequence[PipelineObserver]) -> None:
        self._observers = observers
        self._failed: set[tuple[PipelineObserver, str]] = set()

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        answers = self._call("request_started", request_id, modalities, trace_headers)
        return {name: value for headers in answers for name, value in headers.items()}

    def request_ended(self, summary: RequestSummary) -> None:
        self._call("request_ended", summary)

    def stage_stats(self, stats: StageStats) -> None:
        self._call("stage_stats", stats)

    def engine_metrics(self, stage_id: int, replica: int, families: list[MetricFamily]) -> None:
        self._call("engine_metrics", stage_id, replica, families)

    def watch_speculations(self, counts: SpeculationCounts) -> None:
        self._call("watch_speculations", counts)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for observer in self._observers:
            try:
                answers.append(getattr(observer, method)(*args))
            except Exception:
                if (observer, method) not in self._failed:
                    self._failed.add((observer, method))
                    name = f"{type(observer).__name__}.{method}"
                    logger.exception("%s failed, requests continue; further failures of it are not logged", name)
        return answers
