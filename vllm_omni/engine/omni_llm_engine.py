# SPDX-License-Identifier: Apache-2.0
"""One stage's engine, in the calling process: vLLM's `LLMEngine` with omni inputs and outputs.

It knows one stage only; the orchestrator connects stages.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import EngineInput, PromptType
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import dispatcher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor, UniProcExecutor

from vllm_omni.core.sched.encoder_cache import CountingEncoderCacheManager
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler
from vllm_omni.core.sched.output import RequestWindow, StepRecord
from vllm_omni.engine.engine_args import USAGE_CONTEXT, OmniEngineSettings
from vllm_omni.engine.engine_metrics import EngineMetrics
from vllm_omni.engine.input_processor import OmniInputProcessor, PreprocessedPrompt, share_tokenizer
from vllm_omni.engine.omni_engine_core import OmniEngineCore
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.errors import InvalidRequestError
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_packages import find_models
from vllm_omni.payloads import AdditionalInformationPayload, OmniEngineCoreRequest


class OmniLLMEngine(LLMEngine):
    """Runs one autoregressive or one-step generation stage.

    Not thread-safe. vLLM keeps its forward context in the process, so several engines in one process must be stepped
    one at a time; a pipeline gives each its own process. Close an engine after its last use.

    After an exception out of `step` only `recover` and `close` are allowed; `recover` makes the engine usable again.

    Attributes:
        metrics: vLLM's metrics of it; None without `log_stats`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_closed = False
        self._has_failed = False
        self._in_flight: list[StepRecord] = []  # steps whose outputs were not processed
        self._on_scheduled: Callable[[StepRecord], None] = _ignore
        self._on_done: Callable[[StepRecord], None] = _ignore
        super().__init__(*args, **kwargs | {"stat_loggers": [EngineMetrics]})
        self.metrics = self._keep_metrics_only()
        settings = OmniEngineSettings.from_vllm_config(self.vllm_config)
        base = self.output_processor
        self.input_processor = OmniInputProcessor(self.vllm_config, self.renderer)
        self.output_processor = MultimodalOutputProcessor(
            base.tokenizer,
            output_type=settings.engine_output_type,
            log_stats=base.log_stats,
            stream_interval=base.stream_interval,
            tracing_enabled=base.tracing_enabled,
        )
        assert isinstance(self.engine_core, InprocClient)
        self._core = OmniEngineCore.adopt(self.engine_core)
        self._scheduler = self._core.omni_scheduler
        self._scheduler.on_scheduled = self._start_step
        if isinstance(self._scheduler, OmniGenerationScheduler):
            self._limit_batch(self._scheduler)
        self._sound_cache: Callable[[], CacheCounts] | None = None
        if isinstance(self._scheduler, OmniARScheduler) and isinstance(self.model_executor, UniProcExecutor):
            (self._sound_cache,) = self.collective_rpc("watch_sound_cache")
        self._emits_rows = settings.emits_rows
        if settings.emits_rows and self.vllm_config.cache_config.enable_prefix_caching:
            assert isinstance(self._scheduler, OmniARScheduler)
            self._scheduler.cache_rows(settings.row_cache_bytes)

    @classmethod
    def from_omni_engine_args(cls, engine_args: EngineArgs) -> "OmniLLMEngine":
        """`engine_args`: made by `create_engine_args`."""
        vllm_config = engine_args.create_engine_config(USAGE_CONTEXT)
        return cls.from_omni_config(vllm_config, not engine_args.disable_log_stats)

    @classmethod
    def from_omni_config(cls, vllm_config: VllmConfig, log_stats: bool) -> "OmniLLMEngine":
        """Makes an engine of a configuration that was made of such arguments."""
        share_tokenizer(vllm_config.model_config)
        with narrow_kernel_search():
            return cls(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=log_stats,
                usage_context=USAGE_CONTEXT,
                multiprocess_mode=False,
            )

    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType | EngineInput | PreprocessedPrompt | dict[str, Any],
        params: SamplingParams | PoolingParams,
        *args: Any,
        prompt_text: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Queues a request; `step` makes it progress.

        Args:
            request_id: The caller's id; outputs have it.
            prompt: A prompt as `OmniInputProcessor` takes it, or a request that an `OmniInputProcessor` made.
            params: Sampling parameters. A preprocessed request has its own, and these are not used.
            prompt_text: The text of a preprocessed request, for the output.
            args, kwargs: vLLM's.

        Returns:
            vLLM's internal id.

        Raises:
            InvalidRequestError: The request is wrong; nothing of it was queued.
        """
        self._check_usable()
        if request_id in self.output_processor.external_req_ids:
            raise InvalidRequestError("a request of this id is running", request_id)
        if isinstance(prompt, OmniEngineCoreRequest):
            prompt = _as_preprocessed_prompt(request_id, prompt, prompt_text)
        try:
            return super().add_request(request_id, prompt, params, *args, **kwargs)  # type: ignore[arg-type]
        except Exception:
            self.abort_request([request_id])  # The output processor may hold a request that the core has refused.
            raise

    def await_input(self, request_id: str, num_ready_tokens: int | None) -> None:
        """Marks the input of a request, just after it was added, as incomplete: `add_input` adds more.

        Args:
            request_id: The caller's id.
            num_ready_tokens: Tokens of the request, prompt and generated, that can be computed with the input so far.
                The request, and no other, is held when it has computed them. None: it is not held.
        """
        for req_id in self._internal_ids(request_id):
            request = self._scheduler.omni_request(req_id)
            if request.twin is not None:
                raise InvalidRequestError("a request with guidance needs its whole input at once", request_id)
            request.is_input_complete, request.num_ready_tokens = False, num_ready_tokens

    def add_input(
        self, request_id: str, information: dict[str, Any], num_ready_tokens: int | None, is_last: bool
    ) -> None:
        """Adds to the input of a request after `await_input`.

        Args:
            request_id: The caller's id. An unknown or ended request is ignored.
            information: More `additional_information`.
            num_ready_tokens: As for `await_input`; the last chunk removes the bound.
            is_last: The input is complete.

        Raises:
            InvalidRequestError: The information cannot be serialized. The request is unchanged.
        """
        try:
            payload = AdditionalInformationPayload.from_dict(information) if information else None
        except TypeError as error:
            raise InvalidRequestError(str(error), request_id) from error
        assert isinstance(self._scheduler, OmniARScheduler)
        for req_id in self._internal_ids(request_id):
            self._scheduler.add_input(req_id, payload, num_ready_tokens, is_last)

    def discard_rows(self, request_id: str, first: int) -> None:
        """Keeps the rows of a request, just after it was added, in the engine: it emits tokens only.

        Args:
            request_id: The caller's id.
            first: The first of its sequences without rows; the sequences after it have none either.
        """
        for req_id in self._internal_ids(request_id) if self._emits_rows else ():
            if self.output_processor.request_states[req_id].request_index >= first:
                self._scheduler.omni_request(req_id).emits_rows = False

    def set_window(self, request_id: str, window: RequestWindow) -> None:
        """Marks a request of a one-step stage, just after it was added, as one window of the pipeline's request.

        The model gets its state after the window before. Windows must be computed one after the other; one whose step
        raised is computed again. Call `release_state` when the pipeline's request has ended.
        """
        for req_id in self._internal_ids(request_id):
            self._scheduler.omni_request(req_id).window = window

    def release_state(self, request_id: str) -> None:
        """Removes the model's state of a pipeline's request; does nothing for an unknown one."""
        self.collective_rpc("release_state", args=(request_id,))

    @property
    def batch_tokens(self) -> int:
        """Tokens that one step of a one-step stage computes at once for one request."""
        assert isinstance(self._scheduler, OmniGenerationScheduler)
        return min(self._scheduler.batch_tokens, self.vllm_config.model_config.max_model_len)

    def _limit_batch(self, scheduler: OmniGenerationScheduler) -> None:
        (batch_tokens, *_) = self.collective_rpc("batch_tokens")
        if batch_tokens is not None:
            scheduler.batch_tokens = min(scheduler.batch_tokens, batch_tokens)

    def has_work(self) -> bool:
        """Whether `step` would do anything. False also while every request is held, or its grammar is compiled: then
        only new input, a new request, an abort or a grammar makes progress."""
        return self._scheduler.has_work() or self._core.is_computing

    def kv_blocks(self) -> tuple[int, int]:
        """Used and total blocks of the KV cache. May be called from another thread."""
        pool = self._scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # without vLLM's null block
        return total - pool.get_num_free_blocks(), total

    def encoder_cache_counts(self) -> CacheCounts | None:
        """Hits and queries of encoded media; None for a model that reads none. May be called from another thread."""
        manager = self._scheduler.encoder_cache_manager
        if not manager.cache_size or not isinstance(manager, CountingEncoderCacheManager):
            return None
        return CacheCounts(queries=manager.num_queries, hits=manager.num_hits)

    def sound_cache_counts(self) -> CacheCounts | None:
        """Hits and queries of encoded reference sounds; None for a model that encodes none, or in other processes. May
        be called from another thread."""
        return None if self._sound_cache is None else self._sound_cache()

    def watch_steps(self, on_scheduled: Callable[[StepRecord], None], on_done: Callable[[StepRecord], None]) -> None:
        """`on_scheduled` is called with each step before it is computed, `on_done` when its outputs were processed."""
        self._on_scheduled, self._on_done = on_scheduled, on_done

    def watch_grammars(self, on_compiled: Callable[[], None]) -> None:
        """`on_compiled` is called, on another thread, when `has_work` may have changed: a grammar is compiled."""
        self._core.grammars.on_compiled = on_compiled

    def _start_step(self, step: StepRecord) -> None:
        self._in_flight.append(step)
        self._on_scheduled(step)

    def _end_steps(self) -> None:
        done = [step for step in self._in_flight if step.has_output]
        self._in_flight = [step for step in self._in_flight if not step.has_output]
        for step in done:
            self._on_done(step)

    def isolate(self, request_id: str, num_tokens: int) -> None:
        """Runs a request in steps of its own until it has computed this many tokens again; for use after `recover`."""
        for req_id in self._internal_ids(request_id):
            self._scheduler.isolate(req_id, num_tokens)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Schedules, runs the model once and returns the new outputs: with asynchronous scheduling those of the step
        before, if any.

        Each `RequestOutput` has the attribute `multimodal_output`; see `MultimodalOutputProcessor`.

        Raises:
            Exception: What the model or its hooks raise. Call `recover` next.
        """
        self._check_usable()
        try:
            outputs = super().step()
        except Exception:
            self._has_failed = True
            raise
        self._end_steps()
        return outputs

    def failed_batch(self) -> dict[str, int]:
        """The requests of a step that raised, until `recover`: the callers' ids, and how many tokens each has computed
        after it (the most of several sequences of a request). Empty where scheduling itself raised."""
        failed = self._core.failed_steps(self._in_flight)
        return {req_id: num for step in failed for req_id, num in step.num_computed_tokens.items()}

    def recover(self) -> list[str]:
        """Makes the engine usable again after an exception out of `step`; the requests continue.

        They are computed again, as after a preemption: their tokens stay, and no output is returned twice. An exception
        does not name the request that caused it: the next step with that request raises again. If the device itself is
        broken, the next step raises as well: then close the engine.

        Returns:
            The callers' ids of requests that cannot continue, and were aborted: those of a step that was computed, and
            whose outputs were lost.
        """
        if not self._has_failed:
            return []
        lost = [req_id for step in self._in_flight if step.has_output for req_id in step.num_computed_tokens]
        self.abort_request(lost)
        self._core.restart_requests()
        self._in_flight = []
        self._has_failed = False
        return lost

    def close(self) -> None:
        """Releases the model, the KV cache and vLLM's distributed groups. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.renderer.shutdown()
        self.engine_core.shutdown()

    def _keep_metrics_only(self) -> EngineMetrics | None:
        """Drops vLLM's logger, which writes a line for each stage every ten seconds."""
        if self.logger_manager is None:
            return None
        (metrics,) = (item for item in self.logger_manager.stat_loggers if isinstance(item, EngineMetrics))
        self.logger_manager.stat_loggers = [metrics]
        return metrics

    def _internal_ids(self, request_id: str) -> list[str]:
        """vLLM's ids of the sequences of a request that have not ended."""
        return list(self.output_processor.external_req_ids.get(request_id, ()))

    def _check_usable(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if self._has_failed:
            raise RuntimeError("the last step raised; call recover() before anything else")


def _ignore(step: StepRecord) -> None:
    pass


def _as_preprocessed_prompt(
    request_id: str, request: OmniEngineCoreRequest, prompt_text: str | None
) -> PreprocessedPrompt:
    if request.request_id != request_id:
        raise InvalidRequestError(f"the request was preprocessed as {request.request_id!r}", request_id)
    return {"engine_core_request": request, "prompt": prompt_text, "prompt_token_ids": request.prompt_token_ids or []}


@contextmanager
def narrow_kernel_search() -> Iterator[None]:
    """Meanwhile vLLM looks for its kernels in modules of packages with models alone.

    On a CPU every start of a worker walks through all modules of the process. That writes to each of their objects, and
    so copies 140 MB that a stage shares with the process that it was forked from. An object of llvmlite, which numba
    imports, even ends the walk: it takes any attribute name for a function of its library.
    """
    # Not `sys.modules` itself: another thread may import something.
    vars(dispatcher)["sys"] = SimpleNamespace(modules=_ModulesWithModels())
    try:
        yield
    finally:
        vars(dispatcher)["sys"] = sys


class _ModulesWithModels(Mapping[str, ModuleType]):
    """The part of `sys.modules` that belongs to vLLM, to this package or to others with models."""

    def __init__(self) -> None:
        paths = find_models().architectures.values()
        self._packages = {"vllm", "vllm_omni", *(path.partition(":")[0].partition(".")[0] for path in paths)}

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in list(sys.modules) if name.partition(".")[0] in self._packages])

    def __len__(self) -> int:
        return len(list(iter(self)))
