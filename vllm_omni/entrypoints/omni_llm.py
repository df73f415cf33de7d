# SPDX-License-Identifier: Apache-2.0
"""Offline inference with a pipeline of stages."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from tqdm import tqdm

from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.entrypoints.operations import BlockingOperations
from vllm_omni.entrypoints.withheld_methods import OF_LLM
from vllm_omni.errors import InvalidControlError, InvalidRequestError
from vllm_omni.metrics.logs import log_to_stderr

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.reader import Metric

    from vllm_omni.entrypoints.pipeline import Pipeline
    from vllm_omni.entrypoints.request_builder import StageSamplingParams
    from vllm_omni.events import OmniEvent
    from vllm_omni.inputs import ChatCompletionMessageParam, OmniPrompt
    from vllm_omni.orchestrator.request import PipelineRequest
    from vllm_omni.outputs import OmniRequestOutput

    Prompts = str | OmniPrompt | Sequence[str | OmniPrompt]
    Conversations = list[ChatCompletionMessageParam] | Sequence[list[ChatCompletionMessageParam]]
    SamplingParamsList = Sequence[StageSamplingParams] | StageSamplingParams


class OmniLLM(BlockingOperations, OmniBase):
    """A pipeline of stages, each an engine in its own process.

    Use it as a context manager, or call `close()`: both end all processes and leave nothing behind.

        with OmniLLM("Qwen/Qwen3-Omni-30B-A3B-Instruct") as llm:
            text, speech = llm.generate("Tell me a joke.")

    A diffusers checkpoint is a pipeline of one stage:

        with OmniLLM("path/to/diffusers-model") as llm:
            [output] = llm.generate("A red boat.", {"num_inference_steps": 20, "seed": 1})
            output.images[0].save("boat.png")

    Log lines go to stderr, without what vLLM says of its start, unless its variables (`VLLM_LOGGING_LEVEL`) say
    otherwise.
    """

    _vllm_class = "LLM"
    _withheld_methods = OF_LLM

    def _prepare(self) -> None:
        log_to_stderr()
        self._enqueued: list[_Batch] = []

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: SamplingParamsList = None,
        use_tqdm: bool | None = None,
        *,
        stream: Literal[False] = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[OmniRequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: SamplingParamsList = None,
        use_tqdm: bool | None = None,
        *,
        stream: Literal[True],
        keep_outputs: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[OmniEvent]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: SamplingParamsList = None,
        use_tqdm: bool | None = None,
        *,
        stream: bool = False,
        keep_outputs: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[OmniRequestOutput] | Iterator[OmniEvent]:
        """Runs prompts through the pipeline, many at a time.

        Args:
            prompts: A prompt or several; each a string or a dict (see `OmniPrompt`).
            sampling_params_list: One `SamplingParams` for each stage, in stage order (`DiffusionSamplingParams` for a
                diffusion stage), or a dict of the fields that differ from the configuration; None, or
                None for a stage, means the configuration's defaults. For a pipeline of one stage it need not be a list.
                Diffusion parameters at their own defaults are those of the configuration.
            use_tqdm: Show a progress bar on stderr: completed prompts, and running prompts of each stage. None: only
                without `stream`.
            stream: Return an iterator over the events of all prompts as they occur, instead of waiting for the end.
                A prompt's events have its index, `prompt_index`, and its `request_id`: "0", "1", ... in the order of
                all prompts so far. A prompt that fails ends with an `ErrorEvent`; no error is raised for it. Closing
                the iterator aborts the others.
            keep_outputs: With `stream`, the last event of a prompt has its complete outputs. False: it has only the
                text, tokens and tensors since the event before, and this process does not hold a long output in memory.
            lora_request: The LoRA adapter of the first stage: one for all prompts, or a list with one (or None) for
                each. A vLLM stage needs vLLM's `enable_lora`, e.g.
                `stage_overrides={NAME: {"enable_lora": True}}`.
            priority: Of all prompts, or a list with one for each; lower values come first. It counts in stages with
                `scheduling_policy: priority` and in those that are no vLLM engines, and in admission if it does in the
                first of them.
            on_error: `raise`: the error of the first prompt that failed, when all are complete. `return`: a prompt that
                failed has one output, whose `error` is set. Without effect with `stream`.

        Returns:
            The outputs in the order of the prompts; for each prompt one output for each final stage that its
            `modalities` select, in stage order. With `stream`, events.

        Raises:
            InvalidRequestError: A prompt or its parameters are wrong. Of several prompts the message begins with its
                index: `prompt 11: ...`. The others completed: see the error's `results`.
            RequestError: A prompt failed inside a stage. The same.
            PipelineClosedError: `close()` was called, or this process is a fork of the one that opened the pipeline.
        """
        self._pipeline.orchestrator.check_process()
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error must be 'raise' or 'return', not {on_error!r}", "")
        settings = _settings(prompts, lora_request=lora_request, priority=priority)
        batch = _Batch(self._pipeline, settings, sampling_params_list, stream, keep_outputs)
        events = batch.events(self, use_tqdm=not stream if use_tqdm is None else use_tqdm)
        return events if stream else _collect(events, raises=on_error == "raise")

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params_list: SamplingParamsList = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[str]:
        """Starts prompts, and returns without waiting for their outputs: `wait_for_completion` has them.

        Args:
            use_tqdm: Show a progress bar on stderr while requests are made of the prompts.

        The other arguments are those of `generate`.

        Returns:
            The `request_id` of each prompt's outputs.

        Raises:
            InvalidRequestError: A prompt or its parameters are wrong. None of this call's was started.
            PipelineClosedError: As `generate`.
        """
        self._pipeline.orchestrator.check_process()
        settings = _settings(prompts, lora_request=lora_request, priority=priority)
        num_before = sum(batch.num_prompts for batch in self._enqueued)
        batch = _Batch(self._pipeline, settings, sampling_params_list, first_index=num_before)
        request_ids = batch.start(use_tqdm)
        self._enqueued.append(batch)
        return request_ids

    def wait_for_completion(
        self, use_tqdm: bool | None = None, *, on_error: Literal["raise", "return"] = "raise"
    ) -> list[OmniRequestOutput]:
        """Waits for all prompts of `enqueue` and `enqueue_chat`, whose outputs nobody has had yet.

        The arguments are those of `generate`, and so are the outputs and errors: of all these prompts, in their order.
        """
        return _collect(self._enqueued_events(use_tqdm is not False), raises=on_error == "raise")

    def _enqueued_events(self, use_tqdm: bool) -> Iterator[OmniEvent]:
        while self._enqueued:
            yield from self._enqueued.pop(0).events(self, use_tqdm)

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params_list: SamplingParamsList = ...,
        use_tqdm: bool | None = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> list[OmniRequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params_list: SamplingParamsList = ...,
        use_tqdm: bool | None = ...,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Iterator[OmniEvent]: ...

    def chat(  # type: ignore[misc]  # The overloads leave out what does not change the type.
        self,
        messages: Conversations,
        sampling_params_list: SamplingParamsList = None,
        use_tqdm: bool | None = None,
        *,
        stream: bool = False,
        keep_outputs: bool = True,
        modalities: list[str] | None = None,
        additional_information: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        on_error: Literal["raise", "return"] = "raise",
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[OmniRequestOutput] | Iterator[OmniEvent]:
        """Runs conversations through the pipeline, many at a time: `LLM.chat` of vLLM for a pipeline of stages.

        Args:
            messages: A conversation or several; each a list of messages as in OpenAI's API, with vLLM's parts for media
                (`image_url`, `audio_url`, `input_audio`, `video_url`, `image_pil`).
            modalities: The outputs, e.g. `["text", "audio"]`; default: all that the pipeline has.
            additional_information: As in `OmniPrompt`, e.g. a voice.
            chat_template: A Jinja template instead of the model's own.
            chat_template_content_format: Format of a message's content in the template.
            add_generation_prompt: Append the start of the answer.
            continue_final_message: Continue the last message; needs `add_generation_prompt=False`.
            tools: Tools that the template describes to the model.
            chat_template_kwargs: Further variables of the template.
            mm_processor_kwargs: Arguments of the model's processor, e.g. `{"use_audio_in_video": True}`.

        All other arguments, the return value and the exceptions are those of `generate`.
        """
        prompts = _chat_prompts(
            messages,
            modalities=modalities,
            additional_information=additional_information,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.generate(  # type: ignore[call-overload, misc]
            prompts,
            sampling_params_list,
            use_tqdm,
            stream=stream,
            keep_outputs=keep_outputs,
            lora_request=lora_request,
            priority=priority,
            on_error=on_error,
        )

    def enqueue_chat(
        self,
        messages: Conversations,
        sampling_params_list: SamplingParamsList = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        **options: Any,
    ) -> list[str]:
        """Starts conversations, and returns without waiting for their outputs, as `enqueue`.

        Args:
            options: Those of `chat` for its messages, from `modalities` on.
        """
        prompts = _chat_prompts(messages, **options)
        return self.enqueue(prompts, sampling_params_list, lora_request, priority, use_tqdm)

    def get_metrics(self) -> list[Metric]:
        """vLLM's metrics of all vLLM stages of this process's pipelines, with the labels `pipeline`, `stage` and
        `replica`; as old as a second while a stage works. The pipeline's own are `stats`.

        Raises:
            InvalidControlError: The pipeline was opened without `log_stats=True`.
        """
        if not self._pipeline.orchestrator.log_stats:
            raise InvalidControlError("get_metrics: there are none; open the pipeline with log_stats=True")
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()


class _Batch:
    """The prompts of one call. Its own thread builds and submits them, and blocks while the pipeline is full."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: list[tuple[str | OmniPrompt, dict[str, Any]]],
        sampling_params_list: SamplingParamsList,
        streams: bool = False,
        keep_outputs: bool = True,
        first_index: int | None = None,
    ) -> None:
        """`first_index`: the `prompt_index` of the first one, of several batches that are read together."""
        self._pipeline = pipeline
        self._prompts = prompts
        self._first_index = first_index or 0
        self._numbers_errors = len(prompts) > 1 or first_index is not None
        self._sampling_params_list = sampling_params_list
        self._streams = streams
        self._keep_outputs = keep_outputs
        self._events: queue.Queue[OmniEvent | Exception] = queue.Queue()  # See `StageEngine.inbox`.
        self._is_cancelled = threading.Event()
        self._feeder = threading.Thread(target=self._submit_all, name="omni-feeder", daemon=True)
        self._built: deque[PipelineRequest] = deque()  # by `start`
        self._running: dict[str, None] = {}  # an ordered set
        self._indices: dict[str, int] = {}  # of the prompts, by request id

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def start(self, use_tqdm: bool) -> list[str]:
        """Builds the requests of all prompts now, and starts them; those that are complete make room for others.

        Returns:
            Their ids.

        Raises:
            InvalidRequestError: One cannot be built. None was started.
        """
        prompts = tqdm(self._prompts, "Adding requests", disable=not use_tqdm, dynamic_ncols=True)
        for index, (prompt, settings) in enumerate(prompts):
            try:
                self._built.append(self._build(prompt, settings, self._put_and_release))
            except InvalidRequestError as error:
                if len(self._prompts) > 1:
                    error.args = (f"prompt {index}: {error}", *error.args[1:])
                raise
        request_ids = [request.external_id for request in self._built]
        self._feeder.start()
        return request_ids

    def events(self, owner: OmniLLM, use_tqdm: bool) -> Iterator[OmniEvent]:
        """All events of all prompts, one terminal event for each prompt.

        Args:
            owner: Is not closed by its finalizer while they are read.
        """
        try:
            if self._feeder.ident is None:
                self._feeder.start()
            with _ProgressBar(self._pipeline, len(self._prompts), use_tqdm) as bar:
                while bar.num_done < len(self._prompts):
                    event = self._next_event(bar)
                    self._number(event)
                    if event.is_terminal:
                        self._running.pop(event.request_id, None)
                        del self._indices[event.request_id]
                        self._pipeline.orchestrator.release(event.request_id)
                        bar.advance()
                    yield event
        finally:
            self._cancel(owner)

    def _number(self, event: OmniEvent) -> None:
        """Says which prompt the event is about; the message of its error, too."""
        event.prompt_index = self._indices[event.request_id]
        error = getattr(event, "error", None)  # of an `ErrorEvent`, whose module imports vLLM
        if error is not None and self._numbers_errors:
            error.args = (f"prompt {event.prompt_index}: {error}", *error.args[1:])

    def _next_event(self, bar: _ProgressBar) -> OmniEvent:
        while True:
            bar.refresh_if_due()
            try:
                event = self._events.get(timeout=bar.seconds_until_due)
            except queue.Empty:
                continue
            if isinstance(event, Exception):
                raise event
            return event

    # Called on the feeder's thread.

    def _submit_all(self) -> None:
        try:
            for index, (prompt, settings) in enumerate(self._prompts, self._first_index):
                if self._is_cancelled.is_set():
                    return
                try:
                    request = self._built.popleft() if self._built else self._build(prompt, settings, self._events.put)
                except InvalidRequestError as error:
                    self._indices[error.request_id] = index
                    self._events.put(_as_event(error))
                else:
                    self._indices[request.external_id] = index
                    self._submit(request)
        except Exception as error:
            self._events.put(error)

    def _build(
        self, prompt: str | OmniPrompt, settings: dict[str, Any], on_event: Callable[[OmniEvent], None]
    ) -> PipelineRequest:
        return self._pipeline.builder.build(
            prompt,
            self._sampling_params_list,
            on_event,
            streams=self._streams,
            keep_outputs=self._keep_outputs,
            **settings,
        )

    def _submit(self, request: PipelineRequest) -> None:
        self._running[request.request_id] = None
        orchestrator = self._pipeline.orchestrator
        orchestrator.submit(request, cancelled=self._is_cancelled)
        if self._is_cancelled.is_set():  # `_cancel` may have run before it was in `_running`.
            orchestrator.cancel([request.request_id])

    def _put_and_release(self, event: OmniEvent) -> None:
        """Called on the orchestrator's thread."""
        self._events.put(event)
        if event.is_terminal:
            self._pipeline.orchestrator.release(event.request_id)

    def _cancel(self, owner: OmniLLM) -> None:
        """Aborts running prompts, after the iterator was closed or an error was raised."""
        if not owner.is_open:
            return  # Possibly at interpreter exit: threads do not run then, and modules are empty.
        self._is_cancelled.set()
        if self._running:
            self._pipeline.orchestrator.cancel(list(self._running))
        if self._feeder.is_alive():
            self._feeder.join()


class _ProgressBar:
    """Completed prompts, and running prompts of each stage. If it is not shown, it only counts."""

    interval_s = 0.5

    def __init__(self, pipeline: Pipeline, total: int, is_shown: bool) -> None:
        self._pipeline = pipeline
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not is_shown, dynamic_ncols=True)
        self._due = time.monotonic() + self.interval_s if is_shown else None
        self.num_done = 0

    @property
    def seconds_until_due(self) -> float | None:
        """None: never."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def advance(self) -> None:
        self.num_done += 1
        self._bar.update()

    def refresh_if_due(self) -> None:
        if self._due is not None and self._due <= time.monotonic():
            self._due = time.monotonic() + self.interval_s
            activity = self._pipeline.orchestrator.activity()
            self._bar.set_postfix_str(", ".join(f"{name} {count}" for name, count in activity.items()))

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.set_postfix_str("", refresh=False)
        self._bar.close()


def _settings(prompts: Any, **settings: Any) -> list[tuple[str | OmniPrompt, dict[str, Any]]]:
    """Pairs of a prompt and its settings. Of a setting that is a list each prompt has one entry."""
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    elif not isinstance(prompts, Collection) or isinstance(prompts, (bytes, bytearray)):
        found = type(prompts).__name__
        raise InvalidRequestError(f"prompts must be a string, a dict, or a list of these, not {found}", "")
    of_all = {}
    for name, value in settings.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value] * len(prompts)
        if len(values) != len(prompts):
            raise InvalidRequestError(f"{name} has {len(values)} entries for {len(prompts)} prompts", "")
        of_all[name] = values
    return [(prompt, {name: of_all[name][i] for name in of_all}) for i, prompt in enumerate(prompts)]


def _chat_prompts(
    messages: Conversations,
    *,
    modalities: list[str] | None = None,
    additional_information: dict[str, Any] | None = None,
    chat_template: str | None = None,
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """The prompts of conversations. Arguments and errors are those of `OmniLLM.chat`."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError("continue_final_message needs add_generation_prompt=False", "")
    from vllm_omni.inputs import ChatParams

    template_kwargs = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
    }
    params = ChatParams(
        chat_template=chat_template,
        chat_template_content_format=chat_template_content_format,
        chat_template_kwargs=template_kwargs | (chat_template_kwargs or {}),
        mm_processor_kwargs=mm_processor_kwargs,
    )
    options = {"modalities": modalities, "additional_information": additional_information}
    return [{"messages": each, "chat_params": params, **options} for each in _as_conversations(messages)]


def _as_conversations(messages: Conversations) -> Sequence[Any]:
    """A list of conversations, one if there is only one. Messages are checked with their prompts."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            "messages must be a list of messages, or a list of such lists, not "
            f'{type(messages).__name__}; write [{{"role": "user", "content": "..."}}]',
            "",
        )
    return messages if messages and isinstance(messages[0], (list, tuple)) else [messages]


def _as_event(error: InvalidRequestError) -> OmniEvent:
    """The end of a prompt that was refused."""
    from vllm_omni.events import ErrorEvent

    return ErrorEvent(request_id=error.request_id, sequence=0, ts=time.time(), error=error)


def _collect(events: Iterator[OmniEvent], raises: bool) -> list[OmniRequestOutput]:
    """The outputs of all terminal events, in the order of the prompts.

    Args:
        raises: The first error, if there is one, instead of an output with it.
    """
    from vllm_omni.events import CompletedEvent, ErrorEvent
    from vllm_omni.outputs import OmniRequestOutput

    ends = sorted(events, key=lambda event: int(event.request_id))
    errors = [event.error for event in ends if isinstance(event, ErrorEvent)]
    outputs: list[OmniRequestOutput] = []
    for event in ends:
        if isinstance(event, CompletedEvent):
            outputs += event.outputs
        elif isinstance(event, ErrorEvent) and not raises:
            outputs.append(OmniRequestOutput.failed(event.error))
    if errors and raises:
        errors[0].results = outputs
        raise errors[0]
    return outputs
