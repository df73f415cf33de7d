# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator tells of its requests and stages, and who listens.

`entrypoints.pipeline.make_observers` makes those that are switched on. They run on the orchestrator's thread and must
not block. Exporters run code of others, so what an observer raises is logged by the `CompositeObserver`, and goes no
further.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_omni.metrics.logs import get_logger
from vllm_omni.metrics.stats import StageMetrics, StageStats

logger = get_logger(__name__)

COMPLETED = "completed"


@dataclass(slots=True, kw_only=True)
class RequestSummary:
    """How one request went. Times are `time.monotonic()` seconds.

    Attributes:
        arrival, ended: When it was submitted, and when its terminal event was made.
        outcome: `completed`, or the name of the error's class, e.g. `RequestTimeoutError`.
        failed_stage: Name of the stage that failed it; None where no stage did.
        stages: What each stage that finished its work on it did, in stage order.
        first_text, first_audio: When the first piece of text and of audio reached the orchestrator; None if none did.
        first_image: When the first preview, image or video did.
        num_text_tokens: Tokens of the text that the caller got.
        audio_seconds: Length of the audio that the caller got.
        num_images: Images and videos that the caller got.
        text_stage_id: The final stage that wrote the text; None where there is none.
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
        """Seconds from submission to the first piece of text; the whole text, where it is not streamed."""
        return None if self.first_text is None else self.first_text - self.arrival

    @property
    def ttfa(self) -> float | None:
        """Seconds from submission to the first piece of audio; all of it, where it is not streamed."""
        return None if self.first_audio is None else self.first_audio - self.arrival

    @property
    def ttfi(self) -> float | None:
        """Seconds from submission to the first preview; to the image or video itself, where there are no previews."""
        return None if self.first_image is None else self.first_image - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token of the text after the first one, in the stage that wrote it.

        Where nobody read along the stage does not know when the first token was there: then the mean over all tokens
        since it started.
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
        """Completion time divided by the length of the audio; below 1 it was made faster than it plays."""
        return self.seconds / self.audio_seconds if self.audio_seconds > 0 else None


class PipelineObserver:
    """Hears what a pipeline does. This one does nothing with it."""

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """A request was submitted.

        Args:
            modalities: The outputs that it asks for.
            trace_headers: W3C trace context of the caller, where it has one.

        Returns:
            The trace context that the stages are given (`StageRequest.trace_headers`); empty where nothing is traced.
        """
        return {}

    def request_ended(self, summary: RequestSummary) -> None:
        """A request that was started has its terminal event. Called once for each."""

    def stage_stats(self, stats: StageStats) -> None:
        """A stage sent its figures."""

    def close(self) -> None:
        """The pipeline has ended; nothing is called after this."""


class CompositeObserver(PipelineObserver):
    """Tells several observers. Raises nothing: where one fails, this is logged once for each of its methods."""

    def __init__(self, observers: Sequence[PipelineObserver]) -> None:
        self._observers = observers
        self._failed: set[tuple[PipelineObserver, str]] = set()

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        headers: dict[str, str] = {}
        for observer in self._observers:
            with self._isolate(observer, "request_started"):
                headers.update(observer.request_started(request_id, modalities, trace_headers))
        return headers

    def request_ended(self, summary: RequestSummary) -> None:
        for observer in self._observers:
            with self._isolate(observer, "request_ended"):
                observer.request_ended(summary)

    def stage_stats(self, stats: StageStats) -> None:
        for observer in self._observers:
            with self._isolate(observer, "stage_stats"):
                observer.stage_stats(stats)

    def close(self) -> None:
        for observer in self._observers:
            with self._isolate(observer, "close"):
                observer.close()

    @contextlib.contextmanager
    def _isolate(self, observer: PipelineObserver, method: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if (observer, method) not in self._failed:
                self._failed.add((observer, method))
                name = f"{type(observer).__name__}.{method}"
                logger.exception("%s failed, requests go on; further failures of it are not logged", name)
