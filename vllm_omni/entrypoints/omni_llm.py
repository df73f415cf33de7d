# SPDX-License-Identifier: Apache-2.0
"""Offline inference with a pipeline of stages."""

from __future__ import annotations

import logging
import queue
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from vllm_omni.entrypoints.launch import launch_pipeline

if TYPE_CHECKING:  # vLLM is imported when a pipeline is launched, not before
    from vllm_omni.entrypoints.request_builder import StageSamplingParams
    from vllm_omni.inputs import OmniPrompt
    from vllm_omni.orchestrator.orchestrator import TerminalEvent
    from vllm_omni.outputs import OmniRequestOutput

logger = logging.getLogger("vllm.omni")


class OmniLLM:
    """A pipeline of stages, each an engine in its own process.

    Use it as a context manager, or call `close()`: both end all processes and leave nothing behind.

        with OmniLLM("Qwen/Qwen3-Omni-30B-A3B-Instruct") as llm:
            text, speech = llm.generate("Tell me a joke.")
    """

    def __init__(
        self,
        model: str,
        stage_configs_path: str | None = None,
        *,
        stage_overrides: Mapping[str | int, Mapping[str, Any]] | None = None,
        log_stats: bool = False,
        init_timeout: float = 600.0,
        shm_threshold_bytes: int = 65536,
        **engine_args: Any,
    ) -> None:
        """
        Args:
            model: A checkpoint: a directory, or a name on the Hugging Face hub.
            stage_configs_path: A stage configuration (YAML); by default the one that ships for the model.
            stage_overrides: Engine arguments for single stages, by stage name or id, e.g. `{"talker": {...}}`.
            log_stats: Log what each stage did for each request.
            init_timeout: Seconds that the stages may take to become ready.
            shm_threshold_bytes: Data of at least this size passes between stages through shared memory.
            engine_args: Arguments of vLLM's `EngineArgs` (`dtype`, `max_model_len`, ...), for every vLLM stage.

        Raises:
            VllmRequirementError: vLLM is missing or has another version.
            StageConfigError: The stage configuration or an argument is wrong.
            StageStartError: A stage failed to start, or took too long.
        """
        self._log_stats = log_stats
        self._pipeline = launch_pipeline(
            model,
            stage_configs_path,
            stage_overrides=stage_overrides or {},
            init_timeout=init_timeout,
            shm_threshold_bytes=shm_threshold_bytes,
            engine_args=engine_args,
        )
        # Also runs when the interpreter exits, so that a forgotten close() leaves no process behind.
        self._finalizer = weakref.finalize(self, self._pipeline.orchestrator.close)

    def generate(
        self,
        prompts: str | OmniPrompt | Sequence[str | OmniPrompt],
        sampling_params_list: Sequence[StageSamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """Runs prompts through the pipeline, many at a time, and waits for all of them.

        Args:
            prompts: A prompt or several; each a string or a dict (see `OmniPrompt`).
            sampling_params_list: One `SamplingParams` (or dict of its fields) for each stage, in stage order; None, or
                None in a stage's place, means the configuration's defaults.
            use_tqdm: Show a progress bar.

        Returns:
            The outputs in the order of the prompts; for each prompt one output for each final stage that its
            `modalities` ask for, in stage order.

        Raises:
            InvalidRequestError: A prompt or a parameter is wrong. No prompt of this call is run to its end.
            RequestError: A prompt failed inside a stage. The others were completed: see the error's `results`.
            PipelineClosedError: `close()` was called.
        """
        events: queue.SimpleQueue[TerminalEvent] = queue.SimpleQueue()
        request_ids: list[str] = []
        try:
            for prompt in _as_list(prompts):
                request = self._pipeline.builder.build(prompt, sampling_params_list, events.put)
                self._pipeline.orchestrator.submit(request)
                request_ids.append(request.request_id)
            results = self._collect(events, len(request_ids), use_tqdm)
        except BaseException:
            self._pipeline.orchestrator.abort(request_ids)
            raise
        return _in_order(results, request_ids)

    def close(self) -> None:
        """Ends all stages. Running requests fail with `RequestAbortedError`. May be called twice."""
        self._finalizer()

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _collect(
        self, events: queue.SimpleQueue[TerminalEvent], count: int, use_tqdm: bool
    ) -> dict[str, TerminalEvent]:
        results: dict[str, TerminalEvent] = {}
        with tqdm(total=count, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(results) < count:
                event = events.get()
                results[event.request_id] = event
                bar.update()
                if self._log_stats and event.error is None:
                    _log_stage_metrics(event)
        return results


def _as_list(prompts: str | OmniPrompt | Sequence[str | OmniPrompt]) -> Sequence[str | OmniPrompt]:
    return [prompts] if isinstance(prompts, (str, dict)) else cast(Sequence[Any], prompts)


def _in_order(results: dict[str, TerminalEvent], request_ids: list[str]) -> list[OmniRequestOutput]:
    events = [results[request_id] for request_id in request_ids]
    outputs = [output for event in events for output in event.outputs]
    for event in events:
        if event.error is not None:
            event.error.results = outputs
            raise event.error
    return outputs


def _log_stage_metrics(event: TerminalEvent) -> None:
    for metrics in event.outputs[0].stage_metrics:
        logger.info(
            "request %s, %s: %d in, %d out, %.3f s",
            event.request_id,
            metrics.name,
            metrics.num_input_tokens,
            metrics.num_output_tokens,
            metrics.seconds,
        )
