# SPDX-License-Identifier: Apache-2.0
"""Offline inference with a pipeline of stages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from tqdm import tqdm

from vllm_omni.entrypoints.face import PipelineFace

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm_omni.entrypoints.pipeline import Pipeline
    from vllm_omni.entrypoints.request_builder import StageSamplingParams
    from vllm_omni.events import OmniEvent
    from vllm_omni.inputs import OmniPrompt
    from vllm_omni.outputs import OmniRequestOutput

    Prompts = str | OmniPrompt | Sequence[str | OmniPrompt]


class OmniLLM(PipelineFace):
    """A pipeline of stages, each an engine in its own process.

    Use it as a context manager, or call `close()`: both end all processes and leave nothing behind.

        with OmniLLM("Qwen/Qwen3-Omni-30B-A3B-Instruct") as llm:
            text, speech = llm.generate("Tell me a joke.")
    """

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: Sequence[StageSamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[False] = False,
    ) -> list[OmniRequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: Sequence[StageSamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[True],
    ) -> Iterator[OmniEvent]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params_list: Sequence[StageSamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
    ) -> list[OmniRequestOutput] | Iterator[OmniEvent]:
        """Runs prompts through the pipeline, many at a time.

        Args:
            prompts: A prompt or several; each a string or a dict (see `OmniPrompt`).
            sampling_params_list: One `SamplingParams` (or dict of its fields) for each stage, in stage order; None, or
                None in a stage's place, means the configuration's defaults.
            use_tqdm: Show a progress bar.
            stream: Return an iterator over the events of all prompts, as they happen, instead of waiting for the end.
                A prompt's events have its `request_id`: "0", "1", ... in the order of all prompts ever given. One that
                fails ends with an `ErrorEvent`, and nothing is raised for it. Closing the iterator aborts the rest.

        Returns:
            The outputs in the order of the prompts; for each prompt one output for each final stage that its
            `modalities` ask for, in stage order. With `stream`, events.

        Raises:
            InvalidRequestError: A prompt or a parameter is wrong. No prompt of this call is run to its end.
            RequestError: A prompt failed inside a stage. The others were completed: see the error's `results`.
            PipelineClosedError: `close()` was called.
        """
        batch = _Batch(self._pipeline, _as_list(prompts), sampling_params_list, stream)
        events = batch.events(use_tqdm)
        return events if stream else _collect(events)


class _Batch:
    """The prompts of one call. A thread of its own builds and submits them, and waits where the pipeline is full."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: Sequence[str | OmniPrompt],
        sampling_params_list: Sequence[StageSamplingParams] | None,
        streams: bool,
    ) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._sampling_params_list = sampling_params_list
        self._streams = streams
        self._events: queue.SimpleQueue[OmniEvent | Exception] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._submitted: list[str] = []

    def events(self, use_tqdm: bool) -> Iterator[OmniEvent]:
        """All events of all prompts; the terminal ones are as many as the prompts."""
        feeder = threading.Thread(target=self._submit_all, name="omni-feeder", daemon=True)
        feeder.start()
        try:
            with _ProgressBar(self._pipeline, len(self._prompts), use_tqdm) as bar:
                while bar.num_done < len(self._prompts):
                    event = self._next_event(bar)
                    if event.is_terminal:
                        self._pipeline.orchestrator.release(event.request_id)
                        bar.advance()
                    yield event
        finally:
            self._stop(feeder)

    def _next_event(self, bar: _ProgressBar) -> OmniEvent:
        while True:
            try:
                event = self._events.get(timeout=bar.interval)
            except queue.Empty:
                bar.refresh()
                continue
            if isinstance(event, Exception):
                raise event
            return event

    def _submit_all(self) -> None:
        try:
            for prompt in self._prompts:
                if self._is_stopped.is_set():
                    return
                request = self._pipeline.builder.build(
                    prompt, self._sampling_params_list, self._events.put, streams=self._streams
                )
                self._submitted.append(request.request_id)
                self._pipeline.orchestrator.submit(request)
        except Exception as error:
            self._events.put(error)

    def _stop(self, feeder: threading.Thread) -> None:
        """Whatever is still running was given up by the caller."""
        self._is_stopped.set()
        orchestrator = self._pipeline.orchestrator
        orchestrator.give_up(self._submitted)
        feeder.join()
        orchestrator.give_up(self._submitted)


class _ProgressBar:
    """Requests done, and with how many each stage is busy."""

    def __init__(self, pipeline: Pipeline, total: int, is_shown: bool) -> None:
        self._pipeline = pipeline
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not is_shown, dynamic_ncols=True)
        self.num_done = 0
        self.interval = self._bar.mininterval * 5 if not self._bar.disable else None

    def advance(self) -> None:
        self.num_done += 1
        self._bar.update()
        self.refresh()

    def refresh(self) -> None:
        if not self._bar.disable:
            activity = self._pipeline.orchestrator.activity()
            self._bar.set_postfix_str(", ".join(f"{name} {count}" for name, count in activity.items()))

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()


def _as_list(prompts: Prompts) -> Sequence[str | OmniPrompt]:
    return [prompts] if isinstance(prompts, (str, dict)) else cast("Sequence[Any]", prompts)


def _collect(events: Iterator[OmniEvent]) -> list[OmniRequestOutput]:
    """The outputs of all terminal events, in the order of the prompts."""
    from vllm_omni.events import CompletedEvent, ErrorEvent

    ends = sorted(events, key=lambda event: int(event.request_id))
    outputs = [output for event in ends if isinstance(event, CompletedEvent) for output in event.outputs]
    for event in ends:
        if isinstance(event, ErrorEvent):
            event.error.results = outputs
            raise event.error
    return outputs
