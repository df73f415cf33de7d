# SPDX-License-Identifier: Apache-2.0
"""One request of a vLLM stage: the engine's input for it, and the stage's output from the engine's.

An autoregressive request is one request of the engine, whose input may grow. A request of a one-step stage is one
request of the engine for each window of its input, in order, each with the model's state after those before.
"""

import copy
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.core.sched.output import RequestWindow
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs
from vllm_omni.payloads import OmniEngineCoreRequest
from vllm_omni.stage.engines.base import NewRequest, Result, Stream, StreamChunk
from vllm_omni.stage.engines.playback import Playback, PlayingTime, playing_s

Items = list[Stream | Result]
"""Outputs in order. A `Result` is the last."""


class LLMRequest(ABC):
    """
    Attributes:
        request_id: The pipeline's.
        num_retries: Shared steps that raised, since a request was last found to be the cause.
    """

    def __init__(self, engine: OmniLLMEngine, stage_id: int, item: NewRequest) -> None:
        self.request_id = item.request_id
        self.num_retries = 0
        self._engine = engine
        self._stage_id = stage_id
        self._streams_output = item.streams_output
        self._has_streamed = False
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    @property
    @abstractmethod
    def engine_ids(self) -> list[str]:
        """Ids of the engine's requests for this one."""

    @staticmethod
    @abstractmethod
    def owner_of(engine_id: str) -> str:
        """The pipeline's request id for a request id of the engine."""

    @abstractmethod
    def start(self, item: NewRequest) -> Items:
        """Adds the request to the engine.

        Raises:
            InvalidRequestError: The request is wrong.
        """

    @abstractmethod
    def extend(self, chunk: StreamChunk) -> Items:
        """Adds more input. Raises as `start`."""

    @abstractmethod
    def take(self, output: Any) -> Items:
        """
        Args:
            output: vLLM's `RequestOutput` with the `multimodal_output` that our output processor adds.

        Raises:
            InvalidRequestError: Its grammar cannot be used.
            RuntimeError: vLLM ended the request with an error.
        """

    def abort(self) -> None:
        """Aborts it in the engine."""
        self._engine.abort_request(self.engine_ids)

    def _stream(self, piece: StageOutput) -> Stream:
        self._has_streamed = True
        piece.is_last = False
        return Stream(self.request_id, piece)

    def _result(self, piece: StageOutput) -> Result:
        return Result(self.request_id, piece, self._num_input_tokens, self._num_output_tokens, self._num_cached_tokens)

    def _as_piece(self, output: Any, is_first: bool) -> StageOutput:
        completions = [_as_completion(completion) for completion in output.outputs]
        for completion in completions:
            if completion.finish_reason == "error":
                if completion.stop_reason:  # Our scheduler says what is wrong with the request.
                    raise InvalidRequestError(str(completion.stop_reason), self.request_id)
                raise RuntimeError("vLLM ended the request with an error; see the log of this stage")
        prompt_token_ids = list(output.prompt_token_ids or ()) if is_first else []
        self._num_input_tokens += len(prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens or 0
        self._num_output_tokens += sum(len(completion.token_ids) for completion in completions)
        return StageOutput(
            request_id=self.request_id,
            stage_id=self._stage_id,
            prompt=output.prompt if is_first else None,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=_as_prompt_logprobs(output) if is_first else None,
            num_cached_tokens=output.num_cached_tokens if is_first else None,
            completions=completions,
            # Rows belong to the first completion. In a stream each completion is an output of its own.
            tensors=output.multimodal_output if output.outputs[0].index == 0 else {},
        )


class ARRequest(LLMRequest):
    """A request that is one request of the engine, with the same id."""

    @property
    def engine_ids(self) -> list[str]:
        return [self.request_id]

    @staticmethod
    def owner_of(engine_id: str) -> str:
        return engine_id

    def start(self, item: NewRequest) -> Items:
        output_kind = RequestOutputKind.DELTA if self._streams_output else RequestOutputKind.FINAL_ONLY
        _add_to_engine(self._engine, self.request_id, item.request, item.stage_input, output_kind)
        # Consumers read the first completion only.
        self._engine.discard_rows(self.request_id, first=1 if item.emits_rows else 0)
        if not item.is_last:
            self._engine.await_input(self.request_id, (item.stage_input or item.request).num_ready_tokens)
        return []

    def extend(self, chunk: StreamChunk) -> Items:
        more = chunk.stage_input or StageInput()
        self._engine.add_input(self.request_id, more.additional_information, more.num_ready_tokens, chunk.is_last)
        return []

    def take(self, output: Any) -> Items:
        piece = self._as_piece(output, is_first=not self._has_streamed)
        if output.finished:
            return [self._result(piece)]
        return [] if _is_empty(piece) else [self._stream(piece)]


class GenerationRequest(LLMRequest):
    """A request that is one request of the engine for each window of its input, in order."""

    def __init__(
        self,
        engine: OmniLLMEngine,
        stage_id: int,
        item: NewRequest,
        playing_time: PlayingTime | None = None,
        sample_rate: int | None = None,
    ) -> None:
        """
        Args:
            playing_time: The stage's; None: its own.
            sample_rate: Samples per second of its output. None: it is no sound.
        """
        super().__init__(engine, stage_id, item)
        self._playing_time = playing_time or PlayingTime()
        self._sample_rate = sample_rate
        self._request = item.request
        self._is_input_complete = False
        self._waiting: deque[StageInput | None] = deque()
        self._running: RequestWindow | None = None
        self._num_done = 0
        self._playback = Playback(time.monotonic(), item.request.sent_s)
        self._has_stream = False
        self._finish_reason = "stop"
        self._pieces: list[StageOutput] = []

    @property
    def engine_ids(self) -> list[str]:
        return [] if self._running is None else [_window_id(self._running)]

    @staticmethod
    def owner_of(engine_id: str) -> str:
        return engine_id.rpartition("/")[0]

    def start(self, item: NewRequest) -> Items:
        self._waiting.append(item.stage_input)
        self._is_input_complete = item.is_last
        return self._continue()

    def extend(self, chunk: StreamChunk) -> Items:
        if chunk.stage_input is not None:
            self._waiting.append(chunk.stage_input)
        self._is_input_complete = chunk.is_last
        return self._continue()

    def take(self, output: Any) -> Items:
        self._pieces.append(self._as_window(output))
        self._running = None
        self._num_done += 1
        return self._continue()

    def abort(self) -> None:
        super().abort()
        self._release_state()

    def _continue(self) -> Items:
        """Starts the next window if none runs; returns the available outputs."""
        if self._running is None and self._waiting:
            stage_input = self._next_input()
            window = RequestWindow(
                self.request_id,
                index=self._num_done,
                is_last=self._is_input_complete and not self._waiting,
                streams=self._streams_output,
                due=self._due(stage_input),
            )
            self._run(window, stage_input)
        if self._is_input_complete and self._running is None:
            self._release_state()
            return [self._result(self._merged())]
        pieces: list[StageOutput] = []
        if self._streams_output:
            pieces, self._pieces = self._pieces, pieces
        return [self._stream(piece) for piece in pieces]

    def _due(self, stage_input: StageInput | None) -> float:
        """When a window has to be computed. If nobody plays the output: when it could have been played."""
        if self._streams_output or stage_input is None:
            return self._playback.until
        return self._playback.until + self._playing_time.estimate(len(stage_input.prompt_token_ids))

    def _next_input(self) -> StageInput | None:
        """The next window, with those behind it that fit into one batch."""
        stage_input = self._waiting.popleft()
        while self._waiting:
            later = self._waiting[0]
            if stage_input is None or later is None or not stage_input.is_extensible:
                break
            if len(stage_input.prompt_token_ids) + len(later.prompt_token_ids) > self._engine.batch_tokens:
                break
            self._waiting.popleft()
            stage_input = stage_input.extended_by(later)
        return stage_input

    def _run(self, window: RequestWindow, stage_input: StageInput | None) -> None:
        engine_id = _window_id(window)
        if stage_input is not None and stage_input.finish_reason is not None:
            self._finish_reason = stage_input.finish_reason
        _add_to_engine(self._engine, engine_id, self._request, stage_input, RequestOutputKind.FINAL_ONLY)
        self._running = window
        self._engine.set_window(engine_id, window)
        self._has_stream |= not (window.is_first and window.is_last)

    def _release_state(self) -> None:
        if self._has_stream:
            self._engine.release_state(self.request_id)
            self._has_stream = False

    def _as_window(self, output: Any) -> StageOutput:
        num_tokens = len(output.prompt_token_ids or ())
        num_input_tokens = self._num_input_tokens + num_tokens
        piece = self._as_piece(output, is_first=self._num_done == 0)
        self._num_input_tokens = num_input_tokens
        seconds = playing_s(piece, self._sample_rate)
        self._playing_time.add(num_tokens, seconds)
        self._playback.add(time.monotonic(), seconds)
        piece.completions = []  # The request has one completion, which ends with the last window.
        return piece

    def _merged(self) -> StageOutput:
        completion = Completion(finish_reason=self._finish_reason)
        end = StageOutput(request_id=self.request_id, stage_id=self._stage_id, completions=[completion])
        return merge_stage_outputs([*self._pieces, end])


def _window_id(window: RequestWindow) -> str:
    """The engine's id of a window."""
    return f"{window.request_id}/{window.index}"


def _add_to_engine(
    engine: OmniLLMEngine,
    engine_id: str,
    request: StageRequest,
    stage_input: StageInput | None,
    output_kind: RequestOutputKind,
) -> None:
    """Adds a request under this id. Does not change `request` and `stage_input`: windows of a request share them."""
    trace_headers = request.trace_headers or None
    if request.engine_request is not None:
        ready = _with_engine_id(request.engine_request, engine_id, output_kind, trace_headers)
        assert ready.sampling_params is not None
        engine.add_request(engine_id, ready, ready.sampling_params)
        return
    assert stage_input is not None, "a vLLM stage with sources has a stage input processor"
    assert request.sampling_params is not None, "requests of vLLM stages come with sampling parameters"
    params = stage_input.apply_to(request.sampling_params)
    params.output_kind = output_kind
    prompt = stage_input.as_prompt(request.cache_salt)
    engine.add_request(engine_id, prompt, params, trace_headers=trace_headers, priority=request.priority)


def _with_engine_id(
    request: OmniEngineCoreRequest,
    engine_id: str,
    output_kind: RequestOutputKind,
    trace_headers: dict[str, str] | None,
) -> OmniEngineCoreRequest:
    assert request.sampling_params is not None, "stages take no pooling requests"
    ready = copy.copy(request)
    ready.request_id = engine_id
    ready.sampling_params = copy.copy(request.sampling_params)
    ready.sampling_params.output_kind = output_kind
    ready.trace_headers = trace_headers
    return ready


def _as_prompt_logprobs(output: Any) -> list[dict[int, Logprob] | None] | None:
    if output.prompt_logprobs is None:
        return None
    return [None if position is None else dict(position) for position in output.prompt_logprobs]


def _is_empty(piece: StageOutput) -> bool:
    has_output = any(c.token_ids or c.text or c.finish_reason is not None for c in piece.completions)
    return not has_output and not piece.tensors


def _as_completion(completion: CompletionOutput) -> Completion:
    return Completion(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if completion.logprobs is None else [dict(position) for position in completion.logprobs],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        weight_versions=completion.weight_versions,
    )
