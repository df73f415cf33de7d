# SPDX-License-Identifier: Apache-2.0
"""Online inference with a pipeline of stages: concurrent requests on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.errors import PipelineClosedError

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm.lora.request import LoRARequest

    from vllm_omni.entrypoints.request_builder import StageSamplingParams
    from vllm_omni.events import OmniEvent
    from vllm_omni.inputs import OmniPrompt
    from vllm_omni.orchestrator.request import PipelineRequest


class AsyncOmniLLM(OmniBase):
    """A pipeline of stages, each an engine in its own process.

    The constructor blocks until the pipeline is ready: call it before the event loop runs, or in a thread.

        async for event in llm.generate("Tell me a joke."):
            ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `OmniLLM`."""
        super().__init__(*args, **kwargs)
        # One thread: tokenizers and processors are not thread-safe.
        self._preprocessing = ThreadPoolExecutor(1, thread_name_prefix="omni-preprocessing")
        self._num_preprocessing = 0

    async def generate(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams = None,
        request_id: str | None = None,
        *,
        stream: bool = True,
        keep_outputs: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        request_fields: Mapping[str, Any] | None = None,
        on_accepted: Callable[[], None] | None = None,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one prompt as they occur; the last one is a `CompletedEvent` or an `ErrorEvent`.

        Leaving the loop early, closing the generator, or cancelling the task aborts the request.

        Args:
            prompt: A string or a dict (see `OmniPrompt`).
            sampling_params_list: As for `OmniLLM.generate`.
            request_id: The caller's id, for events and errors; need not be unique. Default: a number.
            stream: Yield segments of the output as they are made; otherwise only the last event.
            keep_outputs: As for `OmniLLM.generate`.
            trace_headers: W3C trace context of the caller (`traceparent`, ...).
            lora_request: As for `OmniLLM.generate`.
            request_fields: Fields of vLLM's `EngineCoreRequest` for the stages that read the prompt, e.g. `priority`.
            on_accepted: Called, on the event loop, when the pipeline has accepted the request, which may then wait for
                admission.

        Raises:
            InvalidRequestError: The prompt or a parameter is wrong.
            PipelineFullError: The queue is full; has the time after which to retry.
            PipelineClosedError: `close()` was called.
        """
        loop = asyncio.get_running_loop()
        orchestrator = self._pipeline.orchestrator
        events: asyncio.Queue[OmniEvent] = asyncio.Queue()

        def on_event(event: OmniEvent) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # The loop was closed while this generator was open.
                orchestrator.cancel([internal_id])

        def build() -> PipelineRequest:
            if not self.is_open:  # It may have been closed while the prompt waited for the thread.
                raise PipelineClosedError("the pipeline was closed before the prompt was preprocessed")
            return self._pipeline.builder.build(
                prompt,
                sampling_params_list,
                on_event,
                request_id=request_id,
                streams=stream,
                keep_outputs=keep_outputs,
                trace_headers=trace_headers,
                lora_request=lora_request,
                request_fields=request_fields,
            )

        request = await self._preprocess(build)
        internal_id = request.request_id  # `on_event` must not refer to `request`, which holds it and all media.
        orchestrator.submit(request, wait=False)
        try:
            if on_accepted is not None:
                on_accepted()
            while not (event := await events.get()).is_terminal:
                yield event
        except BaseException:  # The caller closed the generator, or was cancelled.
            orchestrator.cancel([request.request_id])
            raise
        orchestrator.release(request.request_id)
        yield event

    def check_room(self) -> None:
        """Raises the errors that `generate` would raise for any prompt.

        Raises:
            PipelineFullError: The queue is full.
            PipelineClosedError: `close()` was called.
        """
        self._pipeline.orchestrator.check_room(self._num_preprocessing)

    async def _preprocess(self, build: Callable[[], PipelineRequest]) -> PipelineRequest:
        """Runs `build` in the preprocessing thread; raises at once if the queue has no room for the request."""
        self.check_room()
        self._num_preprocessing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._preprocessing, build)
        finally:
            self._num_preprocessing -= 1

    def close(self) -> None:
        """Ends all stages. Running requests end with an `ErrorEvent`. May be called twice."""
        super().close()
        self._preprocessing.shutdown(wait=False)
