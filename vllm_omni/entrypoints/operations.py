# SPDX-License-Identifier: Apache-2.0
"""What an operator does with a running pipeline, by the names, arguments and results of vLLM's `LLM` and `AsyncLLM`.

`PipelineOperations` has the methods; they block. `BlockingOperations` makes them methods of `OmniLLM`, and
`AsyncOperations` coroutines of `AsyncOmniLLM` and of the server's engine client. A method asks every stage whose kind
knows the verb; what no stage knows is refused.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

import msgspec

from vllm_omni.control import (
    AddLoRA,
    AnyVerb,
    CheckWeights,
    CollectiveRPC,
    CommitWeights,
    DropWeights,
    Freeze,
    LoadWeights,
    ResetEncoderCache,
    ResetMMCache,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    Thaw,
    UpdateWeightVersion,
    Verb,
    WakeUp,
)
from vllm_omni.errors import ControlError, InvalidControlError
from vllm_omni.placement.devices import world_size

if TYPE_CHECKING:
    from torch import nn
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.lora.request import LoRARequest

    from vllm_omni.entrypoints.pipeline import Pipeline

PauseMode = Literal["abort", "wait", "keep"]
"""vLLM's."""

_ONLY_FOLDERS = (
    "weights come from a folder of safetensors, which may be in shared memory, not over NCCL or CUDA IPC: these write "
    "into the weights that stages compute with, so that an update which fails would leave stages with others"
)

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
        self._is_held = False  # by `pause_generation`, and not only for an update
        self._change_lock = threading.RLock()  # of these two, and of what stages compute with
        self._update: dict[int, str] | None = None  # folders of new weights, by stage id, while an update is active
        self._update_lock = threading.Lock()

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
        with self._change_lock:
            self._is_held = True
            drained = self._pipeline.orchestrator.pause(aborts=mode == "abort")
        if mode == "keep":
            self._ask(Freeze())
            return
        if self._pipeline.orchestrator.is_frozen:  # Those that were kept go on, to be completed.
            self._ask(Thaw())
        drained.result()
        if clear_cache and self.is_paused():  # It may have been resumed instead.
            self._clear_caches()

    def resume_generation(self) -> None:
        """Goes on after `pause_generation`.

        Raises:
            InvalidControlError: It sleeps, and what a stage computes with is not there.
        """
        with self._change_lock:
            if self._is_asleep:
                raise InvalidControlError("it sleeps; wake_up takes its memory again, and resumes generation")
            self._ask(Thaw())
            self._is_held = False
            self._pipeline.orchestrator.resume().result()

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._pipeline.orchestrator.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses generation, and gives memory back.

        Args:
            level: 0: none. 1: weights move to the host, and KV caches are discarded; for this vLLM stages need
                `enable_sleep_mode`, and all a GPU. 2: weights are dropped, and `wake_up` loads them again; only of
                diffusion stages. Stages of other kinds keep their memory.
            mode: As for `pause_generation`; `keep` not for diffusion stages.

        Raises:
            InvalidControlError: A stage's memory cannot be given back so; nothing was done.
            ControlError: A stage could not do it; the pipeline is awake.
        """
        if level not in (0, 1, 2):
            raise InvalidControlError(f"level: {level} is not 0, 1 or 2")
        was_held = self._is_held
        if level > 0:
            self._check_sleep(level, mode)
        self.pause_generation(mode=mode, clear_cache=level > 0)
        if level == 0:
            return
        with self._change_lock:
            if not self.is_paused():
                raise ControlError("sleep: generation was resumed meanwhile; nothing was done")
            self._is_asleep = True
            try:
                if mode == "keep":  # They are computed again.
                    self._ask(ResetPrefixCache(reset_running_requests=True))
                self._ask(Sleep(level=level))
            except BaseException:
                self._is_asleep = not all(self._ask(WakeUp()))
                if not (was_held or self._is_asleep):
                    self.resume_generation()
                raise

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
        with self._change_lock:
            if self._is_asleep and memory != []:
                self._is_asleep = not all(self._ask(WakeUp(tags=memory)))
            if not self._is_asleep:
                self.resume_generation()
            return not self._is_asleep

    def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level, or is paused."""
        return self._is_asleep or self.is_paused()

    def _check_sleep(self, level: int, mode: PauseMode) -> None:
        self._check_any(Sleep)
        labels: dict[str, list[str]] = {}
        for stage in self._pipeline.config.stage_args:
            if Sleep in stage.kind.verbs and (problem := stage.kind.sleep_problem(level, mode == "keep")):
                labels.setdefault(problem, []).append(stage.label)
        for problem, stages in labels.items():
            raise InvalidControlError(f"sleep: the memory of {', '.join(stages)} cannot be given back; {problem}")

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
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Starts the profilers of all stages with a `profiler_config`: each process writes its trace into their folder.

        Args:
            profile_prefix: Of the traces' names.
            delay_iterations, max_iterations: Steps before it, and of it.
            profiler_kwargs: Of the profiler itself, of vLLM stages; since vLLM 0.33.

        Raises:
            InvalidControlError: No stage has a profiler, or an argument is wrong.
        """
        verb = StartProfile(
            profile_prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )
        self._ask(_as_sent(verb), self._profiled_stages())

    def stop_profile(self) -> None:
        """Ends the profilers, and writes the traces."""
        self._ask(StopProfile(), self._profiled_stages())

    def _profiled_stages(self) -> list[int]:
        """
        Raises:
            InvalidControlError: There are none.
        """
        stages = [it.stage_id for it in self._pipeline.config.stage_args if it.read_profiler_config() is not None]
        if not stages:
            raise InvalidControlError("no stage has a profiler; set profiler_config (--profiler-config)")
        return stages

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
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of each worker of each vLLM stage.

        Args:
            method: Its name; or a function that gets the worker, if vLLM's `VLLM_ALLOW_INSECURE_SERIALIZATION` is set.
            timeout: Seconds.
            args, kwargs: Plain data.

        Returns:
            What they return, as plain data or text, in the order of stages and replicas.
        """
        called = {"method": method} if isinstance(method, str) else {"function": _pickled(method)}
        verb = CollectiveRPC(**called, timeout=timeout, args=list(args), kwargs=kwargs or {})
        return [value for values in self._ask(verb, timeout=timeout or TIMEOUT_S) for value in values]

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Calls a function with the model of each worker of each vLLM stage: `collective_rpc` with a function."""
        return self.collective_rpc(methodcaller("apply_model", func))

    # Weights.

    def init_weight_transfer_engine(self, request: WeightTransferInitRequest | dict[str, Any]) -> None:
        """Nothing has to be set up: weights come from folders.

        Raises:
            InvalidControlError: `init_info` has anything, such as the address of a trainer.
        """
        info = _field(request, "init_info")
        if info:
            raise InvalidControlError(f"init_info: {_names_in(info)}: {_ONLY_FOLDERS}")
        self._weight_stages(None)

    def start_weight_update(self) -> None:
        """Begins an update of weights. They change with `finish_weight_update`.

        Raises:
            InvalidControlError: One is active, or no stage's weights can change.
        """
        self._weight_stages(None)
        with self._update_lock:
            if self._update is not None:
                raise InvalidControlError("a weight update is active; call finish_weight_update first")
            self._update = {}

    def update_weights(
        self, request: WeightTransferUpdateRequest | dict[str, Any], stage: str | int | None = None
    ) -> None:
        """Compares a folder of new weights with the checkpoint, in all replicas. It must remain until
        `finish_weight_update` has returned, and should as long as a process may have to be replaced.

        Args:
            request: vLLM's, or a dict; its `update_info` is `{"weights_path": FOLDER}`.
            stage: The name or number of the one that it is for; None: all.

        Raises:
            InvalidControlError: It does not fit. The update is given up, as vLLM does; no weight has changed.
        """
        with self._update_lock:
            if self._update is None:
                raise InvalidControlError("start_weight_update must be called before update_weights")
            update, self._update = self._update, None
            paths = self._weight_paths(_weights_path(_field(request, "update_info")), stage)
            given = sorted(update.keys() & paths.keys())
            if given:
                label = self._pipeline.config.stages[given[0]].label
                raise InvalidControlError(f"update_info: this update has a folder for {label}; give all of it in one")
            self._ask_by_path(CheckWeights, paths)
            self._update = update | paths

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Waits for the requests that run, and changes the weights of all replicas; requests that come meanwhile wait.

        All replicas load the new weights beside their own, and only then change to them. A stage that dies while they
        change gets them in its next process.

        Args:
            weight_version: What outputs call them; None: as before.

        Raises:
            InvalidControlError: No update is active, requests are kept by `pause_generation(mode="keep")`, or the
                version is empty.
            ControlError: A replica could not load them, or died. If they were not loaded by all, no weight has changed.
        """
        if weight_version is not None:
            _check_version("weight_version", weight_version)
        with self._update_lock:
            update, self._update = self._update, None
            if update is None:
                raise InvalidControlError("finish_weight_update was called without start_weight_update")
            orchestrator = self._pipeline.orchestrator
            if orchestrator.is_frozen and any(orchestrator.activity().values()):
                raise InvalidControlError("requests are kept that began with the old weights; pause with abort or wait")
            try:
                while not self._try_to_change_weights(update, weight_version):
                    pass  # Generation was resumed meanwhile.
            finally:
                with self._change_lock:
                    if not self._is_held:
                        orchestrator.resume().result()

    def _try_to_change_weights(self, update: dict[int, str], weight_version: str | None) -> bool:
        """Whether no request ran, so that they could change."""
        self._pipeline.orchestrator.pause().result()
        with self._change_lock:
            if not self.is_paused():
                return False
            self._change_weights(update, weight_version)
            return True

    def _change_weights(self, update: dict[int, str], weight_version: str | None) -> None:
        try:
            self._ask_by_path(LoadWeights, update)
        except BaseException:
            self._ask(DropWeights(), list(update))
            raise
        for stage_id, path in update.items():
            version = weight_version or self._pipeline.orchestrator.weight_version(stage_id)
            self._ask(CommitWeights(weights_path=path, weight_version=version), [stage_id])
        if weight_version is not None and not update:
            self.update_weight_version(weight_version)

    def _weight_paths(self, path: str, stage: str | int | None) -> dict[int, str]:
        """The folder for each stage, by stage id. Where a stage's checkpoint is a folder of the pipeline's, it is that
        folder in `path`; without one the stage's weights do not change."""
        model = Path(self._pipeline.orchestrator.model)
        paths = {}
        for stage_id in self._weight_stages(stage):
            own = Path(self._pipeline.config.stages[stage_id].checkpoint(str(model)))
            inside = path
            if own != model and own.is_relative_to(model):
                inside = str(Path(path, own.relative_to(model)))
            if inside == path or os.path.isdir(inside):  # `Path.is_dir` raises for a name that is too long.
                paths[stage_id] = inside
            elif stage is not None:
                paths[stage_id] = path
        return paths

    def _ask_by_path(self, verb: type[CheckWeights | LoadWeights], paths: dict[int, str]) -> None:
        stage_ids: dict[str, list[int]] = {}
        for stage_id, path in paths.items():
            stage_ids.setdefault(path, []).append(stage_id)
        for path, ids in stage_ids.items():
            self._ask(verb(weights_path=path), ids)

    def update_weight_version(self, new_version: str, stage: str | int | None = None) -> None:
        """Calls the weights of a stage, or of all, by another version.

        Raises:
            InvalidControlError: It is empty.
        """
        _check_version("new_version", new_version)
        self._ask(UpdateWeightVersion(new_version=new_version), self._weight_stages(stage))

    def get_weight_version(self, stage: str | int | None = None) -> str:
        """The version of the weights of a stage, or of all.

        Raises:
            InvalidControlError: They differ; names them.
        """
        versions = self.weight_versions(stage)
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{name} {version}" for name, version in versions.items())
            raise InvalidControlError(f"the versions of the stages' weights differ: {listed}")
        return next(iter(versions.values()))

    def weight_versions(self, stage: str | int | None = None) -> dict[str, str]:
        """The versions of the weights of a stage, or of all, by the stages' names."""
        orchestrator, stages = self._pipeline.orchestrator, self._pipeline.config.stages
        return {stages[i].name: orchestrator.weight_version(i) for i in self._weight_stages(stage)}

    def get_world_size(self, include_dp: bool = True, stage: str | int | None = None) -> int:
        """How many workers have weights of a stage, or of all: devices of each replica.

        Args:
            include_dp: Count all replicas; else one of each stage.
        """
        config = self._pipeline.config
        num_replicas = {i: len(config.replicas[i]) if include_dp else 1 for i in self._weight_stages(stage)}
        return sum(num * world_size(config.stages[i]) for i, num in num_replicas.items())

    def _weight_stages(self, stage: str | int | None) -> list[int]:
        """The stages of which weights can change: the one of this name or number, or all."""
        stages = self._pipeline.config.stage_args
        if stage is None:
            self._check_any(CheckWeights)
            return [each.stage_id for each in stages if CheckWeights in each.kind.verbs]
        found = next((each for each in stages if str(stage) in (each.name, str(each.stage_id))), None)
        if found is None:
            names = ", ".join(each.name for each in stages)
            raise InvalidControlError(f"stage: there is no {stage!r}; there are {names}")
        if CheckWeights not in found.kind.verbs:
            raise InvalidControlError(f"the weights of {found.label} ({found.kind.name}) cannot change while it runs")
        return [found.stage_id]

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
        """What each replica returns. `stage_ids`: default: of the stages that know the verb.

        Raises:
            InvalidControlError: An argument has the wrong type, or cannot be sent.
        """
        verb = _as_sent(verb)
        if stage_ids is None:
            self._check_any(type(verb))
            stage_ids = [stage.stage_id for stage in self._pipeline.config.stage_args if type(verb) in stage.kind.verbs]
        return self._pipeline.orchestrator.control(verb, stage_ids, timeout).result()


def _as_sent(verb: AnyVerb) -> AnyVerb:
    """A verb as stages read it."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(verb), type=type(verb))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidControlError(f"{type(verb).__name__}: {error}") from error


def _field(request: Any, name: str) -> Any:
    """A field of one of vLLM's requests for weights, or of a dict."""
    try:
        return request[name] if isinstance(request, dict) else getattr(request, name)
    except KeyError as error:
        raise InvalidControlError(f"{name} is missing") from error


def _weights_path(info: Any) -> str:
    match info:
        case {"weights_path": str(path), **others} if not others:
            return path
    raise InvalidControlError(f'update_info is {{"weights_path": FOLDER}}, not {_names_in(info)}: {_ONLY_FOLDERS}')


def _names_in(info: Any) -> str:
    """What was given; its values may be large."""
    return ", ".join(map(str, info)) if isinstance(info, dict) else type(info).__name__


def _check_version(name: str, version: str) -> None:
    """
    Raises:
        InvalidControlError: It is empty, or no text that can be sent.
    """
    if not version:
        raise InvalidControlError(f"{name} is empty")
    _as_sent(UpdateWeightVersion(new_version=version))


def _pickled(function: Callable[..., Any]) -> bytes:
    from vllm import envs

    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise InvalidControlError(
            "CollectiveRPC: a function is sent to the stages as code; set VLLM_ALLOW_INSECURE_SERIALIZATION=1 before "
            "the pipeline is opened"
        )
    import cloudpickle

    return cloudpickle.dumps(function)


class _Operated(Protocol):
    @property
    def operations(self) -> PipelineOperations: ...


def _blocking(method: Callable[Concatenate[PipelineOperations, P], R]) -> Callable[Concatenate[_Operated, P], R]:
    """An operation as a method of a pipeline."""

    @functools.wraps(method)
    def call(self: _Operated, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.operations, *args, **kwargs)

    return call


def _in_thread(
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


class BlockingOperations:
    """The operations as methods, for a class with the property `operations`."""

    pause_generation = _blocking(PipelineOperations.pause_generation)
    resume_generation = _blocking(PipelineOperations.resume_generation)
    is_paused = _blocking(PipelineOperations.is_paused)
    sleep = _blocking(PipelineOperations.sleep)
    wake_up = _blocking(PipelineOperations.wake_up)
    is_sleeping = _blocking(PipelineOperations.is_sleeping)
    reset_prefix_cache = _blocking(PipelineOperations.reset_prefix_cache)
    reset_mm_cache = _blocking(PipelineOperations.reset_mm_cache)
    reset_encoder_cache = _blocking(PipelineOperations.reset_encoder_cache)
    start_profile = _blocking(PipelineOperations.start_profile)
    stop_profile = _blocking(PipelineOperations.stop_profile)
    collective_rpc = _blocking(PipelineOperations.collective_rpc)
    apply_model = _blocking(PipelineOperations.apply_model)
    init_weight_transfer_engine = _blocking(PipelineOperations.init_weight_transfer_engine)
    start_weight_update = _blocking(PipelineOperations.start_weight_update)
    update_weights = _blocking(PipelineOperations.update_weights)
    finish_weight_update = _blocking(PipelineOperations.finish_weight_update)
    update_weight_version = _blocking(PipelineOperations.update_weight_version)
    get_weight_version = _blocking(PipelineOperations.get_weight_version)
    get_world_size = _blocking(PipelineOperations.get_world_size)


class AsyncOperations:
    """The operations as coroutines, for a class with the property `operations`."""

    pause_generation = _in_thread(PipelineOperations.pause_generation)
    resume_generation = _in_thread(PipelineOperations.resume_generation)
    is_paused = _in_thread(PipelineOperations.is_paused)
    sleep = _in_thread(PipelineOperations.sleep)
    wake_up = _in_thread(PipelineOperations.wake_up)
    is_sleeping = _in_thread(PipelineOperations.is_sleeping)
    reset_prefix_cache = _in_thread(PipelineOperations.reset_prefix_cache)
    reset_mm_cache = _in_thread(PipelineOperations.reset_mm_cache)
    reset_encoder_cache = _in_thread(PipelineOperations.reset_encoder_cache)
    start_profile = _in_thread(PipelineOperations.start_profile)
    stop_profile = _in_thread(PipelineOperations.stop_profile)
    add_lora = _in_thread(PipelineOperations.add_lora)
    collective_rpc = _in_thread(PipelineOperations.collective_rpc)
    init_weight_transfer_engine = _in_thread(PipelineOperations.init_weight_transfer_engine)
    start_weight_update = _in_thread(PipelineOperations.start_weight_update)
    update_weights = _in_thread(PipelineOperations.update_weights)
    finish_weight_update = _in_thread(PipelineOperations.finish_weight_update)
    update_weight_version = _in_thread(PipelineOperations.update_weight_version)
    get_weight_version = _in_thread(PipelineOperations.get_weight_version)
