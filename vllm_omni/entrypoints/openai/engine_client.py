# SPDX-License-Identifier: Apache-2.0
"""A pipeline as vLLM's OpenAI server uses it: an engine that takes rendered prompts and returns `RequestOutput`s.

vLLM's handlers read text: that of the stage that they sample. The options in the `RequestContext` ask for more; the
events of the other outputs then come between the outputs of the text.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.metrics.stats import RequestStateStats

from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext, RequestOptions
from vllm_omni.entrypoints.openai.server_args import RequestLimits, flag
from vllm_omni.entrypoints.openai.stage_params import check_grammar
from vllm_omni.entrypoints.openai.voices import Voices
from vllm_omni.entrypoints.operations import AsyncOperations, PipelineOperations
from vllm_omni.entrypoints.request_builder import StageSamplingParams, make_sampling_params
from vllm_omni.errors import InvalidRequestError, OmniError, PipelineClosedError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt, SpokenText
from vllm_omni.metrics.stats import StageMetrics

EngineOutput = RequestOutput | OmniEvent

MAX_RECENT = 256

# The defaults that vLLM's handlers look up themselves, of those that a stage can have.
_READ_BY_VLLM = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "stop_token_ids",
}  # fmt: skip


class DrainGuard:
    """Counts the requests that a server runs; a shutdown closes it and waits until they have ended.

    The event loop enters it for each request, another thread closes it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self.is_closed = False
        self._is_wait_cancelled = False

    def check(self) -> None:
        """
        Raises:
            PipelineClosedError: It is closed.
        """
        if self.is_closed:
            raise PipelineClosedError("the server is shutting down; send the request to another one")

    def __enter__(self) -> None:
        with self._changed:
            self.check()
            self._num_running += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Refuses new requests, and waits for the running ones for up to `timeout` seconds, or until `cancel_wait`."""
        with self._changed:
            self.is_closed = True
            self._changed.wait_for(lambda: self._num_running == 0 or self._is_wait_cancelled, timeout)

    def cancel_wait(self) -> None:
        """Ends the wait of `close`."""
        with self._changed:
            self._is_wait_cancelled = True
            self._changed.notify_all()


def _unsupported(feature: str) -> Any:
    """A method of vLLM's engine protocol that a pipeline of stages does not support."""

    def method(self: EngineClient, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"a pipeline of stages does not support {feature}")

    return method


@dataclass(frozen=True)
class RecentRequest:
    """A request that was completed.

    Attributes:
        owner: See `RequestContext`.
        started: When it was submitted, in `time.monotonic()` seconds.
        stages: What each stage did for it.
    """

    owner: bytes
    started: float
    stages: Sequence[StageMetrics]


class RecentRequests:
    """The metrics of the last `MAX_RECENT` completed requests of each owner, by their ids. For the event loop."""

    def __init__(self) -> None:
        self._requests: defaultdict[bytes, OrderedDict[str, RecentRequest]] = defaultdict(OrderedDict)

    def add(self, request_id: str, request: RecentRequest) -> None:
        requests = self._requests[request.owner]
        requests[request_id] = request
        if len(requests) > MAX_RECENT:
            requests.popitem(last=False)

    def find(self, request_id: str, owner: bytes) -> RecentRequest | None:
        """None: it is unknown, or another owner's."""
        return self._requests[owner].get(request_id)


class OmniEngineClient(AsyncOperations, EngineClient):
    """What vLLM's server calls in place of `AsyncLLM`.

    Attributes:
        llm: The pipeline.
        config: Its stages.
        voices: The names of its voices in requests.
        recent: The requests that were completed last.
        limits: Those of a request.
        stage: The vLLM stage that reads and samples prompts; None if there is none.
        vllm_config, model_config, renderer, input_processor: Those of `stage`; only where the pipeline `has_renderer`.
        default_sampling_params: Its default sampling parameters; only there, too.
    """

    def __init__(
        self, llm: AsyncOmniLLM, *, shutdown_timeout: float = 0, voice_map: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            shutdown_timeout: Seconds that `shutdown` waits for running requests.
            voice_map: Further names of voices, see `Voices`.

        Raises:
            ValueError: `voice_map` is wrong.
        """
        self.llm = llm
        self.config = llm.config
        self.voices = Voices(llm.voices, voice_map or {})
        self.recent = RecentRequests()
        self.limits = RequestLimits()
        self._drain_guard = DrainGuard()
        self._shutdown_timeout = shutdown_timeout
        self.stage = llm.builder.prompt_stage
        if self.stage is not None:
            self.input_processor: OmniInputProcessor = llm.builder.input_processors[self.stage.stage_id]
            self.vllm_config: VllmConfig = self.input_processor.vllm_config
            self.model_config: ModelConfig = self.vllm_config.model_config
            self.renderer = self.input_processor.renderer
            self.default_sampling_params = dict(llm.builder.default_values(self.stage))
        else:
            self.vllm_config = VllmConfig()
        self.vllm_config.shutdown_timeout = int(shutdown_timeout)

    @property
    def operations(self) -> PipelineOperations:
        """The pipeline's; vLLM's server calls its methods, as coroutines, here."""
        return self.llm.operations

    @property
    def has_renderer(self) -> bool:
        """Whether a vLLM stage reads the prompts, which vLLM's renderer then renders."""
        return self.stage is not None

    @property
    def prompt_fields(self) -> frozenset[str]:
        """See `RequestBuilder`."""
        return self.llm.builder.prompt_fields

    async def run(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one request; the last one is a `CompletedEvent`. Closing the generator aborts the request.

        Args:
            options: `stream`, and further arguments of `AsyncOmniLLM.generate`.

        Raises:
            OmniError: The request was refused, or failed.
        """
        started, context = time.monotonic(), RequestContext.current()
        self._check_grammars(sampling_params_list, request_id)
        fields = {**(options.pop("request_fields", None) or {}), "owner": context.owner.hex()}
        with self._drain_guard:
            events = self.llm.generate(
                prompt,
                sampling_params_list,
                request_id,
                release_when_sent=context.release_when_sent,
                place=context.take_place(),
                count_unread=self._counter_of(prompt, context),
                request_fields=fields,
                **options,
            )
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    if isinstance(event, CompletedEvent) and request_id is not None and event.outputs:
                        self.recent.add(
                            request_id, RecentRequest(context.owner, started, event.outputs[0].stage_metrics)
                        )
                    yield event

    def _counter_of(self, prompt: str | OmniPrompt, context: RequestContext) -> Callable[[int], None] | None:
        """See `AsyncOmniLLM.generate`. Text and speech are made on while their reader waits for its client; images and
        videos are one event each."""
        given = prompt.get("modalities") if isinstance(prompt, Mapping) else None
        if context.budget is None or not {"image", "video"}.isdisjoint(given or self.config.output_types):
            return None
        return context.budget.share(context.client).set

    def _check_grammars(
        self, sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams, request_id: str | None
    ) -> None:
        is_list = isinstance(sampling_params_list, Sequence)
        for params in cast("Sequence[Any]", sampling_params_list) if is_list else [sampling_params_list]:
            try:
                check_grammar(params, self.limits)
            except ValueError as error:
                raise InvalidRequestError(str(error), request_id or "") from error

    def generate(  # type: ignore[override]
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        spoken_text: SpokenText | None = None,
        **unused: Any,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of a rendered prompt: deltas or the whole, see `sampling_params.output_kind`. It may be raw, too, as
        that by which vLLM's handlers of speech find the language.

        If the request has other outputs than text, also their events, and the `CompletedEvent`.
        """
        context = RequestContext.current()
        options = context.options
        omni_prompt = cast(OmniPrompt, {**options.prompt, "engine_input": prompt})
        omni_prompt["modalities"] = list(options.modalities)
        if options.has_media and spoken_text is not None:
            omni_prompt["spoken_text"] = spoken_text
        is_delta = sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        events = self.run(
            omni_prompt,
            self._stage_params(sampling_params, options),
            request_id,
            stream=is_delta,
            keep_outputs=False,  # Streamed outputs are not read again.
            trace_headers=trace_headers,
            lora_request=lora_request,
            priority=priority,
            request_fields={
                "session_id": session_id,
                "reasoning_ended": reasoning_ended,
                "reasoning_parser_kwargs": reasoning_parser_kwargs,
            },
        )
        made = self._outputs(events, prompt, request_id, is_delta, options.has_media)
        outputs = PrefetchedStream(split_outputs(made, context.completed) if options.keeps_media else made)
        context.outputs.append(outputs)
        return outputs

    def _stage_params(self, sampling_params: SamplingParams, options: RequestOptions) -> list[StageSamplingParams]:
        assert self.stage is not None
        given = options.stage_params or [None] * len(self.config.stage_args)
        params: list[StageSamplingParams] = list(given)
        index = self.config.stage_args.index(self.stage)
        defaults = {name: value for name, value in self.default_sampling_params.items() if name not in _READ_BY_VLLM}
        added = {**defaults, **(given[index] or {})}
        params[index] = _with_added(
            sampling_params, {name: value for name, value in added.items() if name not in options.explicit_fields}
        )
        return params

    async def _outputs(
        self,
        events: AsyncGenerator[OmniEvent, None],
        prompt: EngineInput,
        request_id: str,
        is_delta: bool,
        has_media: bool,
    ) -> AsyncGenerator[EngineOutput, None]:
        assert self.stage is not None
        # Of an encoder's and a decoder's prompt it is the decoder's.
        read = cast("Mapping[str, Any]", prompt.get("decoder_prompt", prompt))
        prompt_token_ids = cast("list[int]", read.get("prompt_token_ids") or [])
        output: RequestOutput | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ARSegmentEvent) and event.stage_id == self.stage.stage_id:
                        output = delta_output(event, request_id, prompt_token_ids)
                        yield output
                        continue
                    if isinstance(event, CompletedEvent):
                        times = _engine_times(event, self.stage.stage_id)
                        if output is not None:
                            output.metrics = times  # vLLM's handlers read them after the last output.
                        if not (is_delta and self.stage.final_output):
                            output = self._whole_output(event, request_id, prompt_token_ids)
                            output.metrics = times
                            yield output
                    if has_media or not isinstance(event, CompletedEvent):
                        yield event
        except OmniError as error:  # vLLM's handlers know only HTTP errors, also inside a stream.
            raise to_http_error(error) from error

    def _whole_output(self, event: CompletedEvent, request_id: str, prompt_token_ids: list[int]) -> RequestOutput:
        """The text; empty for a pipeline that returns none, because vLLM's handlers need one."""
        assert self.stage is not None
        for output in event.outputs:
            if output.stage_id == self.stage.stage_id:
                (whole,) = output.request_output
                whole.request_id = request_id
                return whole
        nothing = CompletionOutput(0, "", [], None, None, finish_reason="stop")
        return RequestOutput(request_id, None, prompt_token_ids, None, [nothing], finished=True)

    # Other methods that vLLM's server calls, or those of other servers.

    encode = _unsupported("pooling")
    release_kv_cache_memory = _unsupported("giving back the memory of KV caches alone")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Stages do not transfer KV caches between engines."""

    @property
    def is_running(self) -> bool:
        return self.llm.is_open

    @property
    def is_stopped(self) -> bool:
        """No new requests are accepted; some may still run."""
        return self._drain_guard.is_closed or not self.llm.is_open

    @property
    def errored(self) -> bool:
        """False while a dead stage restarts: its requests wait for it as long as the pipeline is open. Otherwise vLLM's
        server ends itself."""
        return not self.llm.is_open

    @property
    def dead_error(self) -> BaseException:
        if self.llm.error is not None:
            return PipelineClosedError("the pipeline ended on an internal error; see the log, and restart the server")
        return PipelineClosedError("the server is shutting down")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuses a request before it is rendered and its media are fetched, or takes its place in the queue, which it
        has until its next request to the engine. So what an endpoint does before that costs no request its place.

        Args:
            n: Sequences that it has.

        Raises:
            VLLMValidationError: They are too many.
            PipelineFullError: The queue is full.
            PipelineClosedError: The server is shutting down.
        """
        self._drain_guard.check()
        if n > self.limits.max_n:
            raise VLLMValidationError(
                f"n is {n}; a request may have at most {self.limits.max_n} ({flag('max_n')})", parameter="n", value=n
            )
        context = RequestContext.current()
        if not context.is_answering:
            self.llm.check_room(n)
        elif context.place is None:
            context.place = self.llm.reserve(n)

    def has_idle_room(self) -> bool:
        """Whether the pipeline has room for work that may be for nothing: a request would not wait, nor does one."""
        try:
            self._drain_guard.check()
            return not self.llm.would_wait()
        except OmniError:
            return False

    async def check_health(self) -> None:
        """`/health` checks each stage."""

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        if self.transcribes:
            return ("generate", "transcription")
        return ("generate",) if self.has_renderer else ()

    @property
    def transcribes(self) -> bool:
        """Whether the pipeline is one stage of a model that vLLM's handlers transcribe with, such as Whisper."""
        return self._is_all(lambda config: config.registry.is_transcription_model(config.architectures, config))

    @property
    def only_transcribes(self) -> bool:
        """Whether that model does nothing else: it does not chat."""
        return self._is_all(lambda config: config.registry.is_transcription_only_model(config.architectures, config))

    def _is_all(self, check: Callable[[ModelConfig], bool]) -> bool:
        """Whether the pipeline is one stage, which reads prompts, of such a model."""
        return self.stage is not None and self.config.stage_args == [self.stage] and check(self.model_config)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends the engine requests of the current HTTP request; vLLM's handlers of speech end no others."""
        await RequestContext.current().abort()

    async def is_tracing_enabled(self) -> bool:
        return any("otlp_traces_endpoint" in stage.engine_args for stage in self.config.stage_args)

    async def do_log_stats(self) -> None:
        """The pipeline logs at its own interval."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuses new requests, waits up to `shutdown_timeout` for running ones, and stops all stages. Blocks."""
        self._drain_guard.close(self._shutdown_timeout)
        self.llm.close()

    def cancel_wait(self) -> None:
        """Ends the wait of `shutdown` for running requests."""
        self._drain_guard.cancel_wait()


async def split_outputs(
    outputs: AsyncGenerator[EngineOutput, None], completed: list[CompletedEvent]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of text; the last event goes to `completed`."""
    async with aclosing(outputs):
        async for output in outputs:
            if isinstance(output, RequestOutput):
                yield output
            elif isinstance(output, CompletedEvent):
                completed.append(output)


def _with_added(params: SamplingParams, added: Mapping[str, Any]) -> SamplingParams:
    """`params` with the fields in `added`, which vLLM checks and converts."""
    if added:
        made = make_sampling_params(added)
        params = params.clone()
        for name in added:
            setattr(params, name, getattr(made, name))
    return params


def _engine_times(event: CompletedEvent, stage_id: int) -> RequestStateStats | None:
    """When a stage worked on a request, as vLLM's engine says it; for `--enable-per-request-metrics`."""
    stages = event.outputs[0].stage_metrics if event.outputs else []
    stage = next((it for it in stages if it.stage_id == stage_id), None)
    if stage is None:
        return None
    return RequestStateStats(
        num_generation_tokens=stage.num_output_tokens,
        queued_ts=stage.arrival,
        scheduled_ts=stage.started,
        first_token_ts=stage.first_output or 0.0,  # unknown: the output came in one piece
        last_token_ts=stage.finished,
    )


def delta_output(event: ARSegmentEvent, request_id: str, prompt_token_ids: list[int]) -> RequestOutput:
    """A segment of text as an output of vLLM's engine."""
    completion = CompletionOutput(
        index=event.index,
        text=event.text,
        token_ids=event.tokens,
        cumulative_logprob=None,
        logprobs=event.logprobs,
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
    )
    return RequestOutput(
        request_id,
        None,
        prompt_token_ids,
        event.prompt_logprobs,
        [completion],
        finished=event.is_last,
        num_cached_tokens=event.num_cached_tokens,
    )
