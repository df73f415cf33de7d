# SPDX-License-Identifier: Apache-2.0
"""A stage that runs a vLLM engine: autoregressive, or one-step generation.

The loop is vLLM's: read the inbox, step, emit outputs. All requests of the stage share the engine's continuous batch.
"""

import logging
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
from vllm import envs
from vllm.config import CompilationMode, VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput

from vllm_omni.control import (
    AddLoRA,
    CollectiveRPC,
    CommitWeights,
    DropWeights,
    Freeze,
    ResetEncoderCache,
    ResetMMCache,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeightVersion,
    Verb,
    WakeUp,
)
from vllm_omni.core.sched.output import StepRecord
from vllm_omni.engine.engine_args import USAGE_CONTEXT, create_engine_args
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.errors import InvalidRequestError
from vllm_omni.metrics.stats import CacheCounts, MetricFamily
from vllm_omni.stage.engines.base import (
    AbortRequest,
    Error,
    NewRequest,
    Outbox,
    RequestItem,
    Result,
    StageEngine,
    StreamChunk,
)
from vllm_omni.stage.engines.llm_request import ARRequest, GenerationRequest, Items, LLMRequest
from vllm_omni.stage.engines.playback import PlayingTime
from vllm_omni.stage.spec import RayWorkers
from vllm_omni.stage.weights import WeightFolder
from vllm_omni.worker.gpu_worker import is_device_broken

MAX_RETRIES = 3
"""Shared steps that may raise before a request fails with the next one: the cause may be the batch, not one request."""


class LLMStageEngine(StageEngine):
    """Runs an `OmniLLMEngine`.

    An exception in a step does not name a request. All requests lose their computed state, keep their tokens, and
    continue as after a preemption. Those of the failed step run alone until they are past the position: a request that
    raises alone fails with its own error.
    """

    has_own_profiler = True

    def __init__(
        self,
        outbox: Outbox,
        stage_id: int,
        model: str,
        engine_type: str,
        engine_args: dict[str, Any],
        workers: RayWorkers | None = None,
        log_stats: bool = False,
        *,
        transcribes: bool = False,
        sample_rate: int | None = None,
    ) -> None:
        """
        Args:
            transcribes: Its requests are sounds, and its model one that vLLM transcribes with.
            sample_rate: Samples per second of its output, if that is sound.
        """
        super().__init__(outbox)
        self._stage_id = stage_id
        self._log_stats = log_stats
        self._workers = workers
        # The caller's process has the whole cache of preprocessed media. Of vLLM's two halves, in two processes, one
        # would lack what a refused request has left in the other.
        engine_args = engine_args | {"mm_processor_cache_gb": 0}
        self._part = f"{engine_args['model_stage']}." if engine_args.get("model_stage") else ""
        self._engine_args = create_engine_args(model, engine_type=engine_type, **engine_args)
        self._request_class: type[LLMRequest] = GenerationRequest if engine_type == "generation" else ARRequest
        if transcribes:
            from vllm_omni.engine.whisper_processor import make_processor_of_parts
            from vllm_omni.stage.engines.transcribing_request import TranscribingRequest

            make_processor_of_parts()
            self._request_class = TranscribingRequest
        self._playing_time, self._sample_rate = PlayingTime(), sample_rate
        self._engine: OmniLLMEngine
        self._requests: dict[str, LLMRequest] = {}
        self._last_end = 0.0  # of a step, as time.perf_counter()

    @cached_property
    def _vllm_config(self) -> VllmConfig:
        config = self._engine_args.create_engine_config(USAGE_CONTEXT)
        if self._workers is not None:
            config.parallel_config.placement_group = _join_cluster(self._workers)
        return config

    def compiles_at_start(self) -> bool:
        return self._vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)

    def start(self) -> None:
        log_stats = self._log_stats or not self._engine_args.disable_log_stats
        self._engine = OmniLLMEngine.from_omni_config(self._vllm_config, log_stats)
        self._engine.watch_steps(self._on_scheduled, self._on_done)
        self._engine.watch_grammars(lambda: self.inbox.put(_wake))
        self._engine.model_executor.register_failure_callback(self.on_failure)
        self.capacity = self._engine.vllm_config.scheduler_config.max_num_seqs

    def close(self) -> None:
        # vLLM's shutdown takes seconds; without workers in other processes the end of this process suffices.
        if self._engine.vllm_config.parallel_config.world_size > 1:
            self._engine.close()

    def kv_blocks(self) -> tuple[int, int]:
        return self._engine.kv_blocks()

    def cache_counts(self) -> dict[str, CacheCounts]:
        counts = {"encoder": self._engine.encoder_cache_counts(), "reference": self._engine.sound_cache_counts()}
        return {name: count for name, count in counts.items() if count is not None}

    def metrics(self) -> list[MetricFamily]:
        return [] if self._engine.metrics is None else self._engine.metrics.families()

    def control(self, verb: Verb) -> Any:
        engine = self._engine
        match verb:
            case Freeze():
                engine.collective_rpc("synchronize_device")
                return super().control(verb)
            case ResetPrefixCache():
                return engine.reset_prefix_cache(verb.reset_running_requests, verb.reset_connector)
            case ResetMMCache():
                return engine.reset_mm_cache()
            case ResetEncoderCache():
                if self._requests:
                    raise ValueError("requests that run need it; pause first")
                return engine.reset_encoder_cache()
            case StartProfile():
                prefix = "" if verb.profile_prefix is None else f"{verb.profile_prefix}_"
                more = {} if verb.profiler_kwargs is None else {"profiler_kwargs": verb.profiler_kwargs}
                return engine.start_profile(
                    f"{prefix}stage{self._stage_id}",  # The files of all stages are in one folder.
                    delay_iterations=verb.delay_iterations,
                    max_iterations=verb.max_iterations,
                    **more,
                )
            case StopProfile():
                return engine.stop_profile()
            case AddLoRA():
                if engine.vllm_config.lora_config is None:
                    raise ValueError("it takes no LoRA adapters; set enable_lora: true")
                return engine.add_lora(LoRARequest(**msgspec.structs.asdict(verb)))
            case Sleep() | WakeUp():
                return self._sleep_or_wake_up(verb)
            case CollectiveRPC():
                method = verb.method if verb.function is None else _unpickled(verb.function)
                return engine.collective_rpc(method, verb.timeout, tuple(verb.args), verb.kwargs)
            case DropWeights():
                engine.collective_rpc("drop_weights")
            case UpdateWeightVersion():
                engine.set_weight_version(verb.new_version)
        return super().control(verb)

    @cached_property
    def _weight_folder(self) -> WeightFolder:
        config = self._engine.vllm_config
        if config.device_config.device_type != "cpu":
            raise ValueError("the weights of a vLLM stage change while it runs on a CPU only; restart the pipeline")
        if self.compiles_at_start():
            raise ValueError("its compiled model keeps its weights; set enforce_eager: true")
        return WeightFolder(config.model_config.model, config.model_config.revision, self._part)

    def _weight_bytes(self) -> int:
        return sum(self._engine.collective_rpc("weight_bytes"))

    def _load_weights(self, folder: Path) -> Callable[[], None]:
        self._engine.collective_rpc("load_weights_beside", args=(str(folder),))

        def commit() -> None:
            self._engine.collective_rpc("commit_weights")
            self._engine.reset_prefix_cache()
            self._engine.reset_encoder_cache()

        return commit

    def _commit(self, verb: CommitWeights) -> None:
        super()._commit(verb)
        self._engine.set_weight_version(verb.weight_version)

    def has_requests(self) -> bool:
        return bool(self._requests)

    def _sleep_or_wake_up(self, verb: Sleep | WakeUp) -> bool | None:
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise ValueError("its memory cannot be given back; set enable_sleep_mode: true, which needs a GPU")
        executor = self._engine.model_executor
        if isinstance(verb, Sleep):
            return executor.sleep(verb.level)
        executor.wake_up(verb.tags)
        return not executor.is_sleeping

    # Inbox.

    def _take_in(self, item: RequestItem) -> None:
        match item:
            case NewRequest():
                self._add(item)
            case StreamChunk() if item.request_id in self._requests:
                self._extend(item)
            case AbortRequest() if item.request_id in self._requests:
                self._requests.pop(item.request_id).abort()

    def _add(self, item: NewRequest) -> None:
        request_id = item.request_id
        if request_id in self._requests:
            error = InvalidRequestError("a request with this id is running", request_id)
            self.outbox.put(Error.from_exception(request_id, error, invalid=True))
            return
        request = self._requests[request_id] = self._make_request(item)
        self._advance(request, lambda: request.start(item), ValueError, VLLMClientError)

    def _make_request(self, item: NewRequest) -> LLMRequest:
        if issubclass(self._request_class, GenerationRequest):
            return self._request_class(self._engine, self._stage_id, item, self._playing_time, self._sample_rate)
        return self._request_class(self._engine, self._stage_id, item)

    def _extend(self, chunk: StreamChunk) -> None:
        request = self._requests[chunk.request_id]
        self._advance(request, lambda: request.extend(chunk), ValueError, VLLMClientError)

    # Outputs.

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> None:
        """
        Raises:
            Exception: The device is broken, or the engine's state could not be recovered.
        """
        try:
            outputs = self._engine.step()
        except Exception as error:
            if is_device_broken(error):
                self.close()  # Other workers may be waiting for this one, on their devices.
                raise
            self._recover(error)
            return
        with self.outbox.batch():
            for output in outputs:
                request = self._requests.get(self._request_class.owner_of(output.request_id))
                if request is not None:
                    self._take(request, output)

    def _on_scheduled(self, step: StepRecord) -> None:
        # Kernels are compiled for ranges of sizes; each power of two is taken for one.
        self.step_timer.set_shape(step.num_tokens.bit_length())

    def _on_done(self, step: StepRecord) -> None:
        if step.num_sequences:
            started = max(step.started, self._last_end)  # It may have been scheduled while another was computed.
            self._last_end = time.perf_counter()
            self.recorder.step(self._last_end - started, step.num_sequences)

    def _take(self, request: LLMRequest, output: RequestOutput | PoolingRequestOutput) -> None:
        # A later window of its input may be wrong. Any other error is a defect of this stage.
        self._advance(request, lambda: request.take(output), InvalidRequestError)

    def _advance(self, request: LLMRequest, work: Callable[[], Items], *invalid: type[Exception]) -> None:
        """Emits what `work` returns, or fails the request. `invalid`: errors that the request itself causes."""
        try:
            items = work()
        except Exception as error:
            self._fail(request, error, isinstance(error, invalid))
            return
        for item in items:
            if isinstance(item, Result):
                del self._requests[item.request_id]
            self.outbox.put(item)

    def _fail(self, request: LLMRequest, error: Exception, invalid: bool = False) -> None:
        del self._requests[request.request_id]
        request.abort()
        self.outbox.put(Error.from_exception(request.request_id, error, invalid))

    # Recovery after an exception.

    def _recover(self, error: Exception) -> None:
        batch = self._engine.failed_batch()
        lost = {self._request_class.owner_of(engine_id) for engine_id in self._engine.recover()}
        suspects = {self._request_class.owner_of(engine_id) for engine_id in batch} & self._requests.keys()
        for request in list(self._requests.values()):
            is_suspect = request.request_id in suspects
            is_cause = is_suspect and (len(suspects) == 1 or request.num_retries == MAX_RETRIES)
            if is_cause or request.request_id in lost or not suspects:
                self._fail(request, error)
            elif is_suspect:
                request.num_retries += 1
                for engine_id in batch.keys() & set(request.engine_ids):
                    self._engine.isolate(engine_id, batch[engine_id])
            elif len(suspects) == 1:
                request.num_retries = 0  # The cause was that request, not the batch.


def _unpickled(function: bytes) -> Callable[..., Any]:
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise ValueError("it takes no code; set VLLM_ALLOW_INSECURE_SERIALIZATION=1 where it runs")
    return cloudpickle.loads(function)


def _wake() -> None:
    """An item of the inbox that does nothing but wake the engine."""


def _join_cluster(workers: RayWorkers) -> Any:
    """Connects this process to a Ray cluster, for vLLM's Ray executor; returns its placement group."""
    import ray  # an extra

    ray.init(address=workers.address, namespace=workers.namespace, logging_level=logging.ERROR)
    return ray.util.get_placement_group(workers.group)
