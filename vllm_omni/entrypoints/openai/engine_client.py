# SPDX-License-Identifier: Apache-2.0
"""A pipeline as vLLM's OpenAI server sees it: an engine that takes rendered prompts and gives `RequestOutput`s.

vLLM's handlers know text; they get the text of the stage that they sample. A handler of ours that wants more asks
through `with_options`, and gets the events of the other outputs between those of the text.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.config import ModelConfig, VllmConfig
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import BaseRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask

from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.entrypoints.openai.gate import Gate
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.unsupported import UnsupportedEngineClient
from vllm_omni.entrypoints.openai.voices import Voices
from vllm_omni.entrypoints.request_builder import StageSamplingParams, make_sampling_params
from vllm_omni.errors import OmniError, PipelineClosedError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt

EngineOutput = RequestOutput | OmniEvent

# The defaults that vLLM's handlers look up themselves, of those that a stage can have.
_READ_BY_VLLM = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "stop_token_ids",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request says besides what vLLM's handlers understand.

    Attributes:
        modalities: The outputs that its handler can pass on.
        stage_params: For each stage, in stage order, its sampling parameters, or None for its defaults. Those of the
            stage that vLLM's handler samples are added to what that says.
        said: Names of sampling parameters that the request has said to vLLM's handler, which win over `stage_params`.
        prompt: Further keys of the prompt.
    """

    modalities: tuple[str, ...] = ("text",)
    stage_params: Sequence[Mapping[str, Any] | None] | None = None
    said: frozenset[str] = frozenset()
    prompt: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wants_media(self) -> bool:
        return self.modalities != ("text",)


class OmniEngineClient(UnsupportedEngineClient):
    """What vLLM's server calls instead of `AsyncLLM`.

    Attributes:
        llm: The pipeline.
        config: Its stages.
        voices: The names that requests can give for its voices.
        vllm_config, model_config, renderer, input_processor: Those of the stage that reads and samples prompts; only
            where the pipeline `has_renderer`.
        default_sampling_params: What that stage samples with where a request does not say; there too.
    """

    def __init__(
        self, llm: AsyncOmniLLM, *, shutdown_timeout: float = 0, voice_map: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            shutdown_timeout: Seconds that running requests may take to end after `shutdown`.
            voice_map: Further names of voices, see `Voices`, whose errors it raises.
        """
        self.llm = llm
        self.config = llm.config
        self.voices = Voices(llm.voices, voice_map or {})
        self._gate = Gate()
        self._options = RequestOptions()
        self._started: list[_Peekable] = []
        self._shutdown_timeout = shutdown_timeout
        self.stage = llm.builder.prompt_stage
        if self.stage is not None:
            self.input_processor: OmniInputProcessor = llm.builder.input_processors[self.stage.stage_id]
            self.vllm_config: VllmConfig = self.input_processor.vllm_config
            self.model_config: ModelConfig = self.vllm_config.model_config
            self.renderer: BaseRenderer = self.input_processor.renderer
            self.default_sampling_params = dict(llm.builder.default_values(self.stage))
        else:
            self.vllm_config = VllmConfig()
        self.vllm_config.shutdown_timeout = int(shutdown_timeout)

    @property
    def has_renderer(self) -> bool:
        """Whether a vLLM stage reads the prompts, so that they are rendered as vLLM does."""
        return self.stage is not None

    def with_options(self, options: RequestOptions) -> OmniEngineClient:
        """The same engine for one request of a handler of ours."""
        client = copy.copy(self)
        client._options = options
        client._started = []
        return client

    async def started(self) -> None:
        """Waits until each request of this client has made its first output, before anybody is told that it goes well.

        Raises:
            OmniError: One of them failed; the others are aborted.
        """
        try:
            for outputs in self._started:
                await outputs.peek()
        except BaseException:
            await asyncio.gather(*(outputs.aclose() for outputs in self._started))
            raise

    async def run(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams = None,
        request_id: str | None = None,
        *,
        stream: bool,
        keep_outputs: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        request_fields: Mapping[str, Any] | None = None,
        on_accepted: Callable[[], None] | None = None,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one request; the last one is a `CompletedEvent`. Leaving early aborts the request.

        Raises:
            OmniError: The request was refused, or failed.
        """
        with self._gate:
            events = self.llm.generate(
                prompt,
                sampling_params_list,
                request_id,
                stream=stream,
                keep_outputs=keep_outputs,
                trace_headers=trace_headers,
                lora_request=lora_request,
                request_fields=request_fields,
                on_accepted=on_accepted,
            )
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    yield event

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
        **of_other_engines: Any,
    ) -> AsyncIterator[EngineOutput]:
        """Outputs of a rendered prompt, new ones or the whole as `sampling_params.output_kind` says.

        With `with_options`, also the events of other outputs that were asked for, and the last one.
        """
        options = self._options
        omni_prompt = cast(OmniPrompt, {**options.prompt, "engine_input": prompt})
        omni_prompt["modalities"] = list(options.modalities)
        is_delta = sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        events = self.run(
            omni_prompt,
            self._stage_params(sampling_params),
            request_id,
            stream=is_delta,
            keep_outputs=False,  # What was streamed is not read again.
            trace_headers=trace_headers,
            lora_request=lora_request,
            request_fields={
                "priority": priority,
                "session_id": session_id,
                "reasoning_ended": reasoning_ended,
                "reasoning_parser_kwargs": reasoning_parser_kwargs,
            },
        )
        outputs = _Peekable(self._outputs(events, prompt, request_id, is_delta))
        self._started.append(outputs)
        return outputs

    def _stage_params(self, sampling_params: SamplingParams) -> list[StageSamplingParams]:
        assert self.stage is not None
        given = self._options.stage_params or [None] * len(self.config.stage_args)
        params: list[StageSamplingParams] = list(given)
        index = self.config.stage_args.index(self.stage)
        defaults = {name: value for name, value in self.default_sampling_params.items() if name not in _READ_BY_VLLM}
        added = {**defaults, **(given[index] or {})}
        params[index] = _with_added(
            sampling_params, {name: value for name, value in added.items() if name not in self._options.said}
        )
        return params

    async def _outputs(
        self, events: AsyncGenerator[OmniEvent, None], prompt: EngineInput, request_id: str, is_delta: bool
    ) -> AsyncGenerator[EngineOutput, None]:
        assert self.stage is not None
        prompt_token_ids = cast("list[int]", prompt.get("prompt_token_ids") or [])
        async with aclosing(_with_http_errors(events)) as events:
            async for event in events:
                if isinstance(event, ARSegmentEvent) and event.stage_id == self.stage.stage_id:
                    yield _delta_output(event, request_id, prompt_token_ids)
                elif isinstance(event, CompletedEvent):
                    if not is_delta or not self.stage.final_output:
                        yield self._whole_output(event, request_id, prompt_token_ids)
                    if self._options.wants_media:
                        yield event
                else:
                    yield event

    def _whole_output(self, event: CompletedEvent, request_id: str, prompt_token_ids: list[int]) -> RequestOutput:
        """The text; an empty one of a pipeline that shows none, whose handlers need one all the same."""
        assert self.stage is not None
        for output in event.outputs:
            if output.stage_id == self.stage.stage_id:
                (whole,) = output.request_output
                whole.request_id = request_id
                return whole
        nothing = CompletionOutput(0, "", [], None, None, finish_reason="stop")
        return RequestOutput(request_id, None, prompt_token_ids, None, [nothing], finished=True)

    # What follows is what vLLM's server asks of an engine besides.

    @property
    def is_running(self) -> bool:
        return self.llm.is_open

    @property
    def is_stopped(self) -> bool:
        """No request is taken any more, though some may still run."""
        return self._gate.is_closed or not self.llm.is_open

    @property
    def errored(self) -> bool:
        """A stage that died is started again; as long as the pipeline is open it is worth waiting for."""
        return not self.llm.is_open

    @property
    def dead_error(self) -> BaseException:
        return PipelineClosedError("the server is shutting down")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuses a request before pains are taken over it.

        Raises:
            PipelineFullError: As many requests as may wait are waiting.
            PipelineClosedError: The server is shutting down.
        """
        self._gate.check()
        self.llm.check_room()

    async def check_health(self) -> None:
        """Our own endpoint asks each stage."""

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",) if self.has_renderer else ()

    async def is_tracing_enabled(self) -> bool:
        return any("otlp_traces_endpoint" in stage.engine_args for stage in self.config.stage_args)

    async def do_log_stats(self) -> None:
        """The pipeline logs by itself, at its own interval."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Takes no more requests, waits for those that run as long as it may, and ends all stages. Blocks."""
        self._gate.close(self._shutdown_timeout)
        self.llm.close()

    def hurry(self) -> None:
        """Ends the wait of `shutdown` for running requests."""
        self._gate.hurry()

    async def reset_mm_cache(self) -> None:
        """There is none: media are preprocessed once, and no cache is shared with a stage's process."""


class _Peekable:
    """An async generator whose first item can be waited for, and is given again."""

    def __init__(self, items: AsyncGenerator[EngineOutput, None]) -> None:
        self._items = items
        self._peeked: list[EngineOutput] = []

    async def peek(self) -> None:
        with suppress(StopAsyncIteration):
            self._peeked.append(await anext(self._items))

    def __aiter__(self) -> _Peekable:
        return self

    async def __anext__(self) -> EngineOutput:
        return self._peeked.pop() if self._peeked else await anext(self._items)

    async def aclose(self) -> None:
        await self._items.aclose()


async def _with_http_errors(events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[OmniEvent, None]:
    """Errors as vLLM's handlers know them, also those that tell of them inside a stream."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except OmniError as error:
        raise to_http_error(error) from error


def _with_added(params: SamplingParams, added: Mapping[str, Any]) -> SamplingParams:
    """`params` with some fields as in `added`; vLLM checks and converts them where it makes parameters of them."""
    if added:
        made = make_sampling_params(added)
        params = params.clone()
        for name in added:
            setattr(params, name, getattr(made, name))
    return params


def _delta_output(event: ARSegmentEvent, request_id: str, prompt_token_ids: list[int]) -> RequestOutput:
    completion = CompletionOutput(
        index=event.index,
        text=event.text,
        token_ids=event.tokens,
        cumulative_logprob=None,
        logprobs=event.logprobs,
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
    )
    return RequestOutput(request_id, None, prompt_token_ids, None, [completion], finished=event.is_last)
