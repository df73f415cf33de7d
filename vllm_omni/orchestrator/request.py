# SPDX-License-Identifier: Apache-2.0
"""A request as the orchestrator receives it, its state until its terminal event, and what its caller has received.

When a stage's process dies, the request is computed again, and its stream goes on where it was.

Belongs to the orchestrator's thread.
"""

import logging
import time
import zlib
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.engine.text_decoder import TextDecoder
from vllm_omni.errors import RequestError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, ImageProgressEvent, OmniEvent
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.observer import COMPLETED, RequestSummary
from vllm_omni.outputs import (
    Completion,
    OmniRequestOutput,
    StageMetrics,
    StageOutput,
    StreamShapes,
    merge_stage_outputs,
    stream_dim,
    without_content,
)

logger = logging.getLogger("vllm.omni.orchestrator")

_MAX_PIECES = 32
"""Of an output that is not kept: merging them costs more than they take."""
_STRIDE = 64
"""Of 64 rows of a tensor one is kept: 1.5 kB of a second of sound."""


@dataclass(slots=True, kw_only=True)
class PipelineRequest:
    """A request, ready for the stages.

    Attributes:
        request_id: Unique in the pipeline's life.
        external_id: The caller's id; events carry it.
        stages: The input of each stage that it needs, by stage id.
        final_stages: The stages whose output the caller receives.
        streams: The caller reads the output while it is made.
        keep_outputs: The last event has the whole outputs. Otherwise, where `streams` is set, it has only the last
            segment of each, and no earlier ones are kept.
        on_event: Called with each event, on the orchestrator's thread; must not block. The last one is terminal.
        timeout_s: Seconds from `arrival` after which the request fails; None: never.
        arrival: `time.monotonic()` of its making.
        trace_headers: W3C trace context of the caller, where it has one.
        priority: Of its admission; lower values come first.
        decoders: Of the final stages whose engine samples tokens only: these make the text of its output.
        more_input: Input that was not sent yet: the stage, its input, and whether it is the last. Only on the
            orchestrator's thread.
    """

    request_id: str
    external_id: str
    stages: dict[int, StageRequest]
    final_stages: list[int]
    on_event: Callable[[OmniEvent], None]
    streams: bool = False
    keep_outputs: bool = True
    timeout_s: float | None = None
    arrival: float = field(default_factory=time.monotonic)
    trace_headers: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    decoders: dict[int, TextDecoder] = field(default_factory=dict)
    more_input: deque[tuple[int, StageInput, bool]] = field(default_factory=deque)

    @property
    def num_sequences(self) -> int:
        """What it counts in admission: `n` of its sampling parameters."""
        return max((stage.sampling_params.n for stage in self.stages.values() if stage.sampling_params), default=1)

    @property
    def deadline(self) -> float | None:
        return None if self.timeout_s is None else self.arrival + self.timeout_s


class RequestRecord:
    """The state of a request in flight.

    Attributes:
        number: See `messages`.
        instances: The instance of each stage that works on it, by stage id.
        pending: Stages that have not answered.
        unsubmitted: Stages to which it was not submitted yet, because they are restarting.
        request_id: Its id in stages and in messages.
        num_retries: How often it was started again, because a process had died with it.
        is_isolated: This time it is alone in the process where it was lost.
        lost_in: Where it was lost last.
        sent_input: Of `PipelineRequest.more_input`, what was sent.
    """

    def __init__(self, request: PipelineRequest, number: int, config: PipelineConfig) -> None:
        self.request = request
        self.number = number
        self.instances: dict[int, int] = {}
        self.pending = set(request.stages)
        self.unsubmitted = set(request.stages)
        self.request_id = request.request_id
        self.num_retries = 0
        self.is_isolated = False
        self.lost_in: StageHandle | None = None
        self.sent_input: list[tuple[int, StageInput, bool]] = []
        self._config = config
        self._pieces: dict[int, list[StageOutput]] = {stage_id: [] for stage_id in request.final_stages}
        self._shapes = {stage_id: StreamShapes() for stage_id in request.final_stages}
        self._sent = {stage_id: SentOutput() for stage_id in request.final_stages}
        self._metrics: dict[int, StageMetrics] = {}
        self._audio_seconds = 0.0
        self._num_images = 0
        self._num_events = 0
        self._first: dict[str, float] = {}

    @property
    def can_repeat(self) -> bool:
        """Whether it may start again: the caller has no part of the output yet, or the output will be the same, since
        no stage draws tokens without a seed."""
        return not self.has_begun or not any(map(self._draws, self.request.stages.items()))

    @property
    def has_begun(self) -> bool:
        """Whether the caller has a part of the output."""
        return self._num_events > 0

    def _draws(self, stage: tuple[int, StageRequest]) -> bool:
        stage_id, params = stage[0], stage[1].sampling_params
        is_sampled = params is not None and params.temperature > 0 and params.seed is None
        return is_sampled and self._config.stages[stage_id].kind.is_autoregressive

    def make_retry(self, stage: StageHandle) -> "RequestRecord":
        """Makes the request anew, under another id: there may still be messages about this try. The caller gets what it
        has not received.

        Args:
            stage: Where it was lost.
        """
        request = self.request
        retry = RequestRecord(request, 0, self._config)
        retry.num_retries, retry.lost_in = self.num_retries + 1, stage
        if request.streams:
            retry._num_events, retry._sent, retry._pieces = self._num_events, self._sent, self._pieces
            retry._first, retry._audio_seconds, retry._num_images = self._first, self._audio_seconds, self._num_images
            for sent in self._sent.values():
                sent.restart()
        retry.request_id = f"{request.request_id}.retry{retry.num_retries}"
        for stage_request in request.stages.values():
            stage_request.request_id = retry.request_id
            stage_request.sent_s = self._audio_seconds if request.streams else 0.0
        request.more_input.extendleft(reversed(self.sent_input))
        for decoder in request.decoders.values():
            decoder.reset()
        return retry

    def sources(self, stage_id: int) -> list[int]:
        """The stages that `stage_id` waits for, for this request."""
        return [i for i in self._config.stages[stage_id].engine_input_source if i in self.request.stages]

    def targets(self, stage_id: int) -> list[int]:
        """The stages that take the output of `stage_id`, for this request."""
        return [i for i in self._config.targets[stage_id] if i in self.request.stages]

    def is_assigned_to(self, stage: StageHandle) -> bool:
        """Whether this replica was selected for it."""
        return self.instances.get(stage.stage_id) == stage.instance_id

    def is_working(self, stage_id: int) -> bool:
        """Whether the stage has input of this request, as far as the orchestrator can tell, and has not answered."""
        return stage_id in self.pending and not any(
            self._waits_for(source, stage_id) for source in self.sources(stage_id)
        )

    def _waits_for(self, source: int, stage_id: int) -> bool:
        if self._config.window(source, stage_id, None).for_request(self.request.streams).streams:
            return source in self.pending and not self.is_working(source)
        return source in self.pending

    def add_piece(self, stage_id: int, piece: StageOutput) -> None:
        """A segment of a final stage's output; creates the events of a streaming client.

        Raises:
            RepetitionError: It is not what the caller has received before the request was started again.
            Exception: It is not an output of this stage, or cannot be joined to those before.
        """
        self._shapes[stage_id].check(piece)
        if (decoder := self.request.decoders.get(stage_id)) is not None:
            decoder.decode(piece)
        if self.request.streams:
            new = self._sent[stage_id].take_new(piece)
            if new is None:
                return
            piece = new
        output_type = self._config.stages[stage_id].final_output_type or ""
        is_progress = piece.step is not None
        if not is_progress or piece.is_last:
            self._keep(stage_id, piece)
        if not is_progress or piece.tensors:
            self._first.setdefault(output_type, time.monotonic())
        if self.request.streams:
            for event in self._make_events(stage_id, output_type, piece):
                self.request.on_event(event)

    def _keep(self, stage_id: int, piece: StageOutput) -> None:
        pieces = self._pieces[stage_id]
        if pieces and not self.request.keep_outputs:
            pieces[-1] = without_content(pieces[-1])
            if len(pieces) == _MAX_PIECES:
                pieces[:] = [merge_stage_outputs(pieces)]
        pieces.append(piece)
        self._audio_seconds += self._seconds_of(stage_id, piece)
        if self._config.stages[stage_id].final_output_type in ("image", "video"):
            self._num_images += piece.num_media

    def finish(self, stage_id: int, metrics: StageMetrics) -> None:
        """The stage is done with the request."""
        self.pending.discard(stage_id)
        self.unsubmitted.discard(stage_id)  # The last message of a dead process may arrive after its death was noticed.
        self._metrics[stage_id] = metrics

    def complete(self) -> CompletedEvent:
        """The terminal event, for `end`.

        Raises:
            Exception: The outputs cannot be joined, or are no outputs of their type.
        """
        outputs = [
            OmniRequestOutput(
                self.request.external_id,
                merge_stage_outputs(pieces),
                self._config.stages[stage_id].final_output_type or "",
                self._stage_metrics(),
                self._config.stages[stage_id].sample_rate,
            )
            for stage_id, pieces in sorted(self._pieces.items())
        ]
        return CompletedEvent(**self._next_event(), outputs=outputs)

    def fail(self, error: RequestError) -> None:
        self.end(ErrorEvent(**self._next_event(), error=error))

    def end(self, event: CompletedEvent | ErrorEvent) -> None:
        """Delivers the terminal event. What the receiver raises concerns no other request."""
        try:
            self.request.on_event(event)
        except Exception:
            logger.exception("request %s: its receiver raised on the last event", self.request.external_id)

    def summarize(self, outcome: str = COMPLETED, failed_stage: str | None = None) -> RequestSummary:
        """The summary of an ended request, for observers."""
        text_stage = next((i for i in self._pieces if self._config.stages[i].final_output_type == "text"), None)
        text_metrics = None if text_stage is None else self._metrics.get(text_stage)
        return RequestSummary(
            request_id=self.request.request_id,
            arrival=self.request.arrival,
            ended=time.monotonic(),
            outcome=outcome,
            failed_stage=failed_stage,
            stages=self._stage_metrics(),
            first_text=self._first.get("text"),
            first_audio=self._first.get("audio"),
            first_image=min((self._first[kind] for kind in ("image", "video") if kind in self._first), default=None),
            num_text_tokens=text_metrics.num_output_tokens if text_metrics else 0,
            audio_seconds=self._audio_seconds,
            num_images=self._num_images,
            text_stage_id=text_stage,
        )

    def _stage_metrics(self) -> list[StageMetrics]:
        return [self._metrics[stage_id] for stage_id in sorted(self._metrics)]

    def _seconds_of(self, stage_id: int, piece: StageOutput) -> float:
        sample_rate, num_clips = self._config.stages[stage_id].sample_rate, 1
        if piece.num_media:
            sample_rate, num_clips = piece.data.get("sample_rate"), piece.num_media
        wave = piece.tensors.get("audio")
        if sample_rate is None or wave is None:
            return 0.0
        return num_clips * (wave.shape[-1] if wave.ndim else 1) / sample_rate

    def _make_events(self, stage_id: int, output_type: str, piece: StageOutput) -> list[OmniEvent]:
        if piece.step is not None:
            return [
                ImageProgressEvent(
                    **self._next_event(),
                    stage_id=stage_id,
                    final_output_type=output_type,
                    step=piece.step,
                    num_steps=piece.num_steps or 0,
                    index=piece.data.get("index", 0),
                    image=piece.tensors.get("image"),
                    is_last=piece.is_last,
                )
            ]
        completions = piece.completions or [Completion()]
        return [
            ARSegmentEvent(
                **self._next_event(),
                stage_id=stage_id,
                final_output_type=output_type,
                index=completion.index,
                text=completion.text,
                tokens=completion.token_ids,
                logprobs=completion.logprobs,
                multimodal_output=piece.tensors if completion is completions[0] else {},
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                num_cached_tokens=piece.num_cached_tokens if completion is completions[0] else None,
                prompt_logprobs=piece.prompt_logprobs if completion is completions[0] else None,
                is_last=piece.is_last and completion is completions[-1],
            )
            for completion in completions
        ]

    def _next_event(self) -> dict:
        sequence, self._num_events = self._num_events, self._num_events + 1
        return {"request_id": self.request.external_id, "sequence": sequence, "ts": time.time()}


class RepetitionError(Exception):
    """An output that is made again does not begin as the one that was sent."""


class _Sent(ABC):
    """A part of the output that grows.

    Attributes:
        num: Units that were sent.
        num_repeated: Units that were made again.
    """

    def __init__(self) -> None:
        self.num = self.num_repeated = 0

    def restart(self) -> None:
        """It is made again."""
        self.num_repeated = 0

    def count_known(self, piece: Any) -> int:
        """How many units of a piece were sent before.

        Raises:
            RepetitionError: They differ.
        """
        begin, known = self.num_repeated, min(len(piece), self.num - self.num_repeated)
        self.num_repeated += len(piece)
        if known:
            self._compare(piece[:known], begin)
        if known < len(piece):
            self._keep(piece[known:], begin + known)
            self.num = self.num_repeated
        return known

    @abstractmethod
    def _compare(self, units: Any, begin: int) -> None:
        """Compares units with those that were sent from `begin` on. Raises as `count_known`."""

    @abstractmethod
    def _keep(self, units: Any, begin: int) -> None:
        """Notes units that are sent, from `begin` on."""


class _SentValues(_Sent):
    """A text, or tokens, of which a checksum is kept."""

    def __init__(self, to_bytes: Callable[[Any], Any]) -> None:
        super().__init__()
        self._to_bytes = to_bytes
        self._checksum = 0
        self._repeated = 0  # the checksum of what was made again

    def _compare(self, units: Any, begin: int) -> None:
        self._repeated = zlib.crc32(self._to_bytes(units), self._repeated if begin else 0)
        if self.num_repeated >= self.num and self._repeated != self._checksum:
            raise RepetitionError

    def _keep(self, units: Any, begin: int) -> None:
        self._checksum = zlib.crc32(self._to_bytes(units), self._checksum)


class _SentRows(_Sent):
    """A tensor of which some rows are kept. Those that are made again may differ by as much as kernels do with the size
    of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[torch.Tensor] = []

    def _compare(self, units: torch.Tensor, begin: int) -> None:
        if len(self._marks) > 1:
            self._marks = [torch.cat(self._marks)]
        again = units[-begin % _STRIDE :: _STRIDE].double()
        first = -(-begin // _STRIDE)
        sent = self._marks[0][first : first + len(again)].double()
        if not torch.allclose(again, sent, rtol=0.01, atol=0.001, equal_nan=True):
            raise RepetitionError

    def _keep(self, units: torch.Tensor, begin: int) -> None:
        self._marks.append(units[-begin % _STRIDE :: _STRIDE].clone())


class SentOutput:
    """The streamed output of one stage for one request."""

    def __init__(self) -> None:
        self._texts: dict[int, _Sent] = defaultdict(lambda: _SentValues(str.encode))  # by index of a sequence
        self._tokens: dict[int, _Sent] = defaultdict(lambda: _SentValues(partial(array, "q")))
        self._rows: dict[str, _Sent] = defaultdict(_SentRows)
        self._num_media = 0
        self._ended: set[int] = set()  # indices of sequences
        self._steps: dict[int, int] = {}  # the last one, by index of a diffusion stage's output
        self._has_begun = self._has_ended = self._is_repeating = False

    def restart(self) -> None:
        """The output is made again."""
        self._is_repeating = self._has_begun
        for part in self._parts:
            part.restart()

    def take_new(self, piece: StageOutput) -> StageOutput | None:
        """What is new in the next piece of the output; None: nothing.

        Raises:
            RepetitionError: What was sent before differs from what the piece has there.
        """
        if piece.step is not None:
            return self._take_step(piece, piece.step)
        completions = [new for each in piece.completions if (new := self._take_completion(each)) is not None]
        tensors = self._take_tensors(piece)
        is_end = piece.is_last and not self._has_ended
        self._has_begun, self._has_ended = True, self._has_ended or piece.is_last
        if not self._is_repeating:
            return piece
        self._is_repeating = any(part.num_repeated < part.num for part in self._parts)
        if self._is_repeating and piece.is_last:
            raise RepetitionError
        if not (completions or tensors or is_end):
            return None
        return msgspec.structs.replace(
            piece, completions=completions, tensors=tensors, prompt_logprobs=None, num_cached_tokens=None
        )

    def _take_step(self, piece: StageOutput, step: int) -> StageOutput | None:
        index = piece.data.get("index", 0)
        if step <= self._steps.get(index, -1):
            return None
        self._steps[index], self._has_begun = step, True
        return piece

    def _take_completion(self, completion: Completion) -> Completion | None:
        index, text, tokens = completion.index, completion.text, completion.token_ids
        characters = self._texts[index].count_known(text)
        known = self._tokens[index].count_known(tokens)
        has_ended = completion.finish_reason is not None and index not in self._ended
        if has_ended:
            self._ended.add(index)
        if not self._is_repeating:
            return completion
        if not has_ended and characters == len(text) and known == len(tokens):
            return None
        logprobs = completion.logprobs and completion.logprobs[known:]
        return msgspec.structs.replace(completion, text=text[characters:], token_ids=tokens[known:], logprobs=logprobs)

    def _take_tensors(self, piece: StageOutput) -> dict[str, torch.Tensor]:
        if piece.num_media:  # They come whole.
            is_known, self._num_media = self._num_media > 0, piece.num_media
            return {} if is_known else piece.tensors
        tensors = {name: self._take_rows(name, tensor) for name, tensor in piece.tensors.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor.numel()}

    def _take_rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = stream_dim(name)
        rows = (tensor[None] if tensor.ndim == 0 else tensor).movedim(dim, 0)
        known = self._rows[name].count_known(rows)
        return tensor if known == 0 else rows[known:].movedim(0, dim)

    @property
    def _parts(self) -> Iterator[_Sent]:
        return chain(self._texts.values(), self._tokens.values(), self._rows.values())
