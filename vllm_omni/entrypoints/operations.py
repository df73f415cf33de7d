# SPDX-License-Identifier: Apache-2.0
"""What an operator does with a running pipeline, by the names, arguments and results of vLLM's `LLM` and `AsyncLLM`.

`PipelineOperations` has the methods; they block. `blocking` and `in_thread` make them methods of `OmniLLM`, and
coroutines of `AsyncOmniLLM` and of the server's engine client. A method asks every stage whose kind knows the verb;
what no stage knows is refused.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

from vllm_omni.control import (
    AddLoRA,
    AnyVerb,
    CollectiveRPC,
    Freeze,
    ResetEncoderCache,
    ResetMMCache,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    Thaw,
    Verb,
    WakeUp,
)
from vllm_omni.errors import InvalidControlError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from vllm_omni.entrypoints.pipeline import Pipeline

PauseMode = Literal["abort", "wait", "keep"]
"""vLLM's."""

TIMEOUT_S = 600.0
"""For all replicas to do a verb: a trace of a profiler takes minutes to write."""

P = ParamSpec("P")
R = TypeVar("R")


class PipelineOperations:
    """The operations of one pipeline. They may be called from any thread; verbs are done one after the other.

    All raise `ControlError` if a stage could not do it, and `PipelineClosedError`. The pipeline serves on.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_asleep = False

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops generation, until `resume_generation`. Requests that come meanwhile wait, as far as the queue has room.

        Args:
            mode: What becomes of the requests that run: `abort`: they end with `RequestAbortedError`. `wait`: they are
                completed before this returns. `keep`: all stages stop after their step, and go on with them later.
            clear_cache: Forget prefixes, media and encoded media of the stages, too. Not with `keep`.

        Raises:
            InvalidControlError: There is no such mode.
        """
        if mode not in get_args(PauseMode):
            raise InvalidControlError(f"mode: {mode!r} is not one of {', '.join(get_args(PauseMode))}")
        drained = self._pipeline.orchestrator.pause(aborts=mode == "abort")
        if mode == "keep":
            self._ask(Freeze())
            return
        drained.result()
        if clear_cache and self.is_paused():  # It may have been resumed instead.
            self._clear_caches()

    def resume_generation(self) -> None:
        """Goes on after `pause_generation`."""
        self._ask(Thaw())
        self._pipeline.orchestrator.resume().result()

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._pipeline.orchestrator.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses generation, and gives memory back.

        Args:
            level: 0: none. 1: weights move to the host, and KV caches are discarded. 2: both are discarded. Stages need
                vLLM's `enable_sleep_mode` for 1 and 2, and so a GPU; those without a vLLM engine keep their memory.
            mode: As for `pause_generation`.
        """
        if level not in (0, 1, 2):
            raise InvalidControlError(f"level: {level} is not 0, 1 or 2")
        if level > 0:
            self._check_sleep_mode()
        self.pause_generation(mode=mode, clear_cache=level > 0)
        if level > 0:
            self._is_asleep = True
            if mode == "keep":  # They are computed again.
                self._ask(ResetPrefixCache(reset_running_requests=True))
            self._ask(Sleep(level=level))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory again after `sleep`, and resumes generation once all of it is there.

        Args:
            tags: `weights`, `kv_cache`, `scheduling` (after level 0); None: all.

        Returns:
            Whether everything is awake.
        """
        unknown = sorted(set(tags or ()) - {"weights", "kv_cache", "scheduling"})
        if unknown:
            raise InvalidControlError(f"tags: {', '.join(unknown)}: there are weights, kv_cache and scheduling")
        memory = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        awake: list[bool] = []
        if self._is_asleep and memory != []:
            awake = self._ask(WakeUp(tags=memory))
        self._is_asleep = self._is_asleep and not (awake and all(awake))
        if not self._is_asleep:
            self.resume_generation()
        return not self._is_asleep

    def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level, or is paused."""
        return self._is_asleep or self.is_paused()

    def _check_sleep_mode(self) -> None:
        self._check_any(Sleep)
        stages = [stage for stage in self._pipeline.config.stage_args if Sleep in stage.kind.verbs]
        lacking = [stage.label for stage in stages if not stage.engine_args.get("enable_sleep_mode")]
        if lacking:
            raise InvalidControlError(
                f"sleep: the memory of {', '.join(lacking)} cannot be given back; set enable_sleep_mode: true, which "
                "needs a GPU, or use level 0"
            )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets prefixes, and the rows that are kept with them.

        Args:
            reset_running_requests: Those that run are preempted, and computed again; else they hold what they read.
            reset_connector: Those of KV connectors, too.

        Returns:
            Whether nothing held them.
        """
        verb = ResetPrefixCache(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return all(self._ask(verb))

    def reset_mm_cache(self) -> None:
        """Forgets preprocessed media, in this process and in the stages."""
        self._pipeline.builder.clear_media_cache()
        self._ask(ResetMMCache())

    def reset_encoder_cache(self) -> None:
        """Forgets encoded pictures, sounds, reference sounds of voices, and prompts of diffusion.

        Raises:
            InvalidControlError: Requests that run in a vLLM stage need them.
        """
        self._ask(ResetEncoderCache())

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts the profilers of all vLLM stages (`profiler_config`): each writes its trace into their folder.

        Args:
            profile_prefix: Of the traces' names.
            delay_iterations, max_iterations: Steps before it, and of it.
        """
        self._ask(
            StartProfile(
                profile_prefix=profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
            )
        )

    def stop_profile(self) -> None:
        """Ends the profilers, and writes the traces."""
        self._ask(StopProfile())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads or checks an adapter in the stages that apply a request's adapter: one that does not fit fails here."""
        config = self._pipeline.config
        stages = [
            stage.stage_id
            for stage in config.stage_args
            if stage.stage_id in config.adapter_stages or stage.engine_args.get("enable_lora")
        ]
        if not stages:
            raise InvalidControlError("no stage of this pipeline takes LoRA adapters; set enable_lora: true")
        names = AddLoRA.__struct_fields__
        return all(self._ask(AddLoRA(**{name: getattr(lora_request, name) for name in names}), stages))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of each worker of each vLLM stage.

        Args:
            timeout: Seconds.
            args, kwargs: Plain data.

        Returns:
            What they return, as plain data or text, in the order of stages and replicas.
        """
        verb = CollectiveRPC(method=method, timeout=timeout, args=list(args), kwargs=kwargs or {})
        return [value for values in self._ask(verb, timeout=timeout or TIMEOUT_S) for value in values]

    def _clear_caches(self) -> None:
        known = self._known
        if ResetPrefixCache in known:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self.reset_mm_cache()
        if ResetEncoderCache in known:
            self.reset_encoder_cache()

    @property
    def _known(self) -> set[type[Verb]]:
        return {verb for stage in self._pipeline.config.stage_args for verb in stage.kind.verbs}

    def _check_any(self, verb: type[Verb]) -> None:
        if verb not in self._known:
            kinds = ", ".join(f"{stage.label} ({stage.kind.name})" for stage in self._pipeline.config.stage_args)
            raise InvalidControlError(f"{verb.__name__}: no stage knows it: {kinds}")

    def _ask(self, verb: AnyVerb, stage_ids: Sequence[int] | None = None, timeout: float = TIMEOUT_S) -> list[Any]:
        """What each replica returns. `stage_ids`: default: of the stages that know the verb."""
        if stage_ids is None:
            self._check_any(type(verb))
            stage_ids = [stage.stage_id for stage in self._pipeline.config.stage_args if type(verb) in stage.kind.verbs]
        return self._pipeline.orchestrator.control(verb, stage_ids, timeout).result()


class _Operated(Protocol):
    @property
    def operations(self) -> PipelineOperations: ...


def blocking(method: Callable[Concatenate[PipelineOperations, P], R]) -> Callable[Concatenate[_Operated, P], R]:
    """An operation as a method of a pipeline."""

    @functools.wraps(method)
    def call(self: _Operated, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.operations, *args, **kwargs)

    return call


def in_thread(
    method: Callable[Concatenate[PipelineOperations, P], R],
) -> Callable[Concatenate[_Operated, P], Coroutine[Any, Any, R]]:
    """An operation as a coroutine. Each call has a thread of its own: one that waits keeps no other from running."""

    @functools.wraps(method)
    async def call(self: _Operated, *args: P.args, **kwargs: P.kwargs) -> R:
        result: Future[R] = Future()
        result.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result.set_result(method(self.operations, *args, **kwargs))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="omni-operation", daemon=True).start()
        return await asyncio.wrap_future(result)

    return call


class AsyncOperations:
    """The operations as coroutines, for a class with the property `operations`."""

    pause_generation = in_thread(PipelineOperations.pause_generation)
    resume_generation = in_thread(PipelineOperations.resume_generation)
    is_paused = in_thread(PipelineOperations.is_paused)
    sleep = in_thread(PipelineOperations.sleep)
    wake_up = in_thread(PipelineOperations.wake_up)
    is_sleeping = in_thread(PipelineOperations.is_sleeping)
    reset_prefix_cache = in_thread(PipelineOperations.reset_prefix_cache)
    reset_mm_cache = in_thread(PipelineOperations.reset_mm_cache)
    reset_encoder_cache = in_thread(PipelineOperations.reset_encoder_cache)
    start_profile = in_thread(PipelineOperations.start_profile)
    stop_profile = in_thread(PipelineOperations.stop_profile)
    add_lora = in_thread(PipelineOperations.add_lora)
    collective_rpc = in_thread(PipelineOperations.collective_rpc)
