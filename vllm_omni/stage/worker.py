# SPDX-License-Identifier: Apache-2.0
"""The main function of a stage process: an engine and an IO thread for each of its stages.

Most processes have one stage.
"""

import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
from vllm.utils.system_utils import decorate_logs, set_process_title

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.resources import parse_memory
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.distributed.locked_folder import hold
from vllm_omni.function_stage import load_function_stage
from vllm_omni.metrics.logs import configure_process, log_warnings
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.placement.cores import bind_cores
from vllm_omni.placement.devices import alone_on_devices, set_stage_gpu_devices
from vllm_omni.placement.share import take_share
from vllm_omni.stage.engines.base import Outbox, StageEngine, Started
from vllm_omni.stage.shell import StageShell
from vllm_omni.stage.spec import RayWorkers, StageSpec
from vllm_omni.stage.watchdog import Watchdog

_T = TypeVar("_T")
_FUNCTION_BATCH_SIZE = 8
_SWITCH_INTERVAL_S = 0.0001
"""After which the engine's thread gives up the interpreter's lock, if the IO thread waits for it. With Python's 5 ms a
first token waits for most of the next step."""


class HostedStage:
    """One stage of this process. Its IO thread runs from the start, and detects the end of the parent."""

    engine: StageEngine

    def __init__(self, spec: StageSpec, lifeline: socket.socket, watchdog: Watchdog) -> None:
        self.spec = spec
        self._watchdog = watchdog
        self.label = spec.instance.label
        self._lifeline = lifeline
        self._outbox = Outbox()
        self._recorder = StageRecorder(spec.stage.stage_id, spec.instance.name, spec.instance.replica)
        self._tracer = None if spec.otlp_traces_endpoint is None else StageTracer(spec.otlp_traces_endpoint)
        self._shell = StageShell(spec, lifeline, partial(os._exit, 1), self._outbox, self._recorder, self._tracer)
        self._threads: list[threading.Thread] = []
        self.start_thread("io", self._shell.run)

    def make_engine(self) -> None:
        stage = self.spec.stage
        self.engine = make_stage_engine(stage, self.spec.model, self._outbox, self.spec.workers, self.spec.log_stats)
        self.engine.on_failure = partial(_exit_process, self._lifeline, f"{self.label}: a worker of its engine ended")
        self.engine.recorder = self._recorder
        io_timer = None
        if limit_s := stage.runtime.step_timeout_s:
            self.engine.set_timers(partial(self._watchdog.watch, self.label, limit_s, self.engine.always_compiles))
            io_timer = self._watchdog.watch(self.label, limit_s, always_compiles=False)
        self._shell.attach(self.engine, load_stage_input_processor(stage, self.spec.model), io_timer)

    def start(self) -> None:
        """Starts the engine; then the stage accepts requests."""
        with alone_on_devices(self.spec.run_dir, self.spec.stage):
            self.engine.start()
        log_warnings()
        self._outbox.put(Started())

    def join(self) -> None:
        """Waits until its threads have ended, after a `ShutdownMessage`."""
        for thread in self._threads:
            thread.join()
        if self._tracer is not None:
            self._tracer.close()

    def start_thread(self, what: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self.run_or_exit, args=(work,), name=f"{self.spec.instance.name}-{what}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def run_or_exit(self, work: Callable[[], _T]) -> _T:
        """Runs a part of the stage's work. If it raises, the process ends and reports the error over the lifeline."""
        try:
            return work()
        except BaseException as error:
            try:
                traceback.print_exc()
            finally:
                _exit_process(self._lifeline, f"{self.label}: {type(error).__name__}: {error}")


def _exit_process(lifeline: socket.socket, message: str) -> NoReturn:
    try:
        sys.stdout.flush()
        lifeline.sendall(message.encode())
    finally:
        os._exit(1)


def main(spec_bytes: bytes, lifeline: socket.socket) -> list[HostedStage]:
    """Runs a stage process; returns when all of its stages have been shut down.

    Args:
        spec_bytes: A list of `StageSpec` as JSON.
        lifeline: Its end-of-file means that the parent is gone. Receives the error of a stage that fails in a thread,
            or whose step takes too long.

    Returns:
        The stages. Deleting them destroys their engines, which takes seconds; the end of the process is faster.

    Raises:
        Exception: The only stage of the process could not start, or its engine broke; the caller reports it.
    """
    specs = [_on_this_machine(spec) for spec in msgspec.json.decode(spec_bytes, type=list[StageSpec])]
    _set_up_process(specs)
    watchdog = Watchdog(partial(_exit_process, lifeline))
    stages = [HostedStage(spec, lifeline, watchdog) for spec in specs]
    if len(stages) == 1:
        _run_alone(stages[0], watchdog)
    else:
        _run_together(stages, watchdog)
    return stages


def _on_this_machine(spec: StageSpec) -> StageSpec:
    """Replaces `share` by what follows from it. Raises as `take_share`."""
    if spec.share is None:
        return spec
    instance, placement = take_share(spec.share, spec.instance.instance_id)
    return msgspec.structs.replace(spec, instance=instance, placement=placement, share=None)


def _run_alone(stage: HostedStage, watchdog: Watchdog) -> None:
    """Runs the engine on the main thread."""
    stage.make_engine()
    watchdog.start()
    stage.start()
    stage.engine.run()
    stage.engine.close()
    stage.join()


def _run_together(stages: list[HostedStage], watchdog: Watchdog) -> None:
    """Runs every engine on a thread of its own.

    Engines start one after the other, and all before any steps: vLLM sets defaults of the whole process while it loads.
    """
    for stage in stages:
        stage.run_or_exit(stage.make_engine)
    watchdog.start()
    in_order = sorted(stages, key=lambda stage: not stage.run_or_exit(stage.engine.must_start_first))
    for stage in in_order:
        stage.run_or_exit(stage.start)
    for stage in stages:
        stage.start_thread("engine", stage.engine.run)
    for stage in stages:
        stage.join()
    for stage in reversed(in_order):
        stage.engine.close()


def _set_up_process(specs: list[StageSpec]) -> None:
    hold(Path(specs[0].run_dir))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # vLLM leaves a rendezvous file in the temporary directory; it is removed with the run directory.
    tempfile.tempdir = specs[0].run_dir
    if all(spec.workers is None for spec in specs):  # Ray's may be on other machines.
        os.environ["VLLM_RPC_BASE_PATH"] = specs[0].run_dir  # likewise for the sockets of the engine's workers
    name = "+".join(spec.instance.name for spec in specs)
    set_process_title(name, prefix="vllm_omni")
    decorate_logs(name)
    configure_process()
    bind_cores(specs[0].placement)
    for spec in specs:  # All stages that name devices name the same.
        if spec.stage.runtime.devices is not None:
            set_stage_gpu_devices(spec.stage.runtime.devices, spec.instance.label)  # type: ignore[arg-type]
            break


def make_stage_engine(
    stage: OmniStageConfig,
    model: str,
    outbox: Outbox,
    workers: RayWorkers | None = None,
    log_stats: bool = False,
) -> StageEngine:
    """The engine of a stage, not started."""
    # Engines are imported here: each stage loads only its own libraries.
    if stage.runs_vllm:
        from vllm_omni.stage.engines.llm import LLMStageEngine

        kind, engine_args = stage.kind.lower(), stage.vllm_engine_args
        return LLMStageEngine(
            outbox,
            stage.stage_id,
            model,
            kind,
            engine_args,
            workers,
            log_stats,
            transcribes=stage.transcribes,
            sample_rate=stage.sample_rate,
        )
    if stage.kind == "function":
        from vllm_omni.stage.engines.function import BatchFunctionStageEngine, FunctionStageEngine
        from vllm_omni.stage.engines.function_stage import FunctionStageThreads

        if (function_class := load_function_stage(stage)) is not None:
            function = function_class(stage, stage.checkpoint(model))
            return FunctionStageThreads(outbox, function, stage.runtime.max_batch_size or 1)
        if stage.batch_function is not None:
            batch_size = stage.runtime.max_batch_size or _FUNCTION_BATCH_SIZE
            return BatchFunctionStageEngine(outbox, stage.stage_id, stage.batch_function, batch_size)
        assert stage.function is not None
        return FunctionStageEngine(outbox, stage.stage_id, stage.function)
    if stage.kind == "fake":
        from vllm_omni.stage.engines.fake import FakeStageEngine

        return FakeStageEngine(outbox, stage.stage_id, stage.name)
    from vllm_omni.stage.engines.diffusion import DiffusionStageEngine

    config = parse_dit_config(stage.dit_engine_args, stage.label)
    memory = None if stage.runtime.memory is None else parse_memory(stage.runtime.memory)
    return DiffusionStageEngine(outbox, stage.stage_id, model, config, memory)
