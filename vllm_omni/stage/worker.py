# SPDX-License-Identifier: Apache-2.0
"""The main function of a stage process: an engine on the main thread, and an IO thread."""

import os
import socket
import sys
import tempfile
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
from vllm.platforms import current_platform
from vllm.utils.system_utils import decorate_logs, set_process_title

from vllm_omni.control import CommitWeights, LoadWeights
from vllm_omni.distributed.locked_folder import hold
from vllm_omni.metrics.logs import configure_process, get_logger, log_warnings
from vllm_omni.metrics.memory import release_free_memory, use_huge_pages
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.placement.cores import bind_cores
from vllm_omni.placement.devices import alone_on_devices, set_stage_gpu_devices
from vllm_omni.placement.share import take_share
from vllm_omni.placement.shared_cores import SharedCores
from vllm_omni.stage.engines.base import Outbox, StageEngine, Started
from vllm_omni.stage.shell import StageShell
from vllm_omni.stage.spec import StageSpec
from vllm_omni.stage.watchdog import Watchdog

logger = get_logger(__name__)

_SWITCH_INTERVAL_S = 0.0001
"""After which the engine's thread gives up the interpreter's lock, if the IO thread waits for it. With Python's 5 ms a
first token waits for most of the next step."""


class HostedStage:
    """The stage of this process. Its IO thread runs from the start, and detects the end of the parent."""

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
        self._io_thread = threading.Thread(target=self._run_io, name=f"{spec.instance.name}-io", daemon=True)
        self._io_thread.start()

    def make_engine(self) -> None:
        stage = self.spec.stage
        self.engine = stage.kind.make_engine(self.spec.model, self._outbox, self.spec.workers, self.spec.log_stats)
        self.engine.on_failure = partial(_exit_process, self._lifeline, f"{self.label}: a worker of its engine ended")
        self.engine.recorder = self._recorder
        profiler_config = None if self.engine.has_own_profiler else stage.read_profiler_config()
        if profiler_config is not None:
            from vllm_omni.stage.profiler import make_stage_profiler  # imports vLLM's

            self.engine.profiler = make_stage_profiler(profiler_config, stage.stage_id)
        if self.spec.placement.max_threads is not None:
            self.engine.cores = SharedCores(
                Path(self.spec.run_dir), self.spec.instance.instance_id, self.spec.placement
            )
        io_timer = None
        if limit_s := stage.runtime.step_timeout_s:
            self.engine.set_timers(partial(self._watchdog.watch, self.label, limit_s, self.engine.always_compiles))
            io_timer = self._watchdog.watch(self.label, limit_s, always_compiles=False)
        self._shell.attach(self.engine, load_stage_input_processor(stage, self.spec.model), io_timer)

    def start(self) -> None:
        """Starts the engine; then the stage accepts requests."""
        with alone_on_devices(self.spec.run_dir, self.spec.stage):
            if self.engine.compiles_at_start():
                logger.info("%s: compiles its model, for minutes on a machine's first start", self.label)
            self.engine.start()
        self._update_weights()
        release_free_memory()
        if current_platform.is_cpu():
            use_huge_pages()
        log_warnings()
        self._outbox.put(Started())

    def _update_weights(self) -> None:
        """Brings a process that replaces another one to the weights of the pipeline."""
        path, version = self.spec.weights_path, self.spec.weight_version
        if path is None:
            self.engine.weight_version = version
            return
        try:
            self.engine.control(LoadWeights(weights_path=path))
            self.engine.control(CommitWeights(weights_path=path, weight_version=version))
        except Exception as error:
            logger.error("%s: has the weights of its checkpoint, not those of %s: %s", self.label, path, error)
            self.engine.weight_version = ""

    def join(self) -> None:
        """Waits until its IO thread has ended, after a `ShutdownMessage`."""
        self._io_thread.join()
        if self._tracer is not None:
            self._tracer.close()

    def _run_io(self) -> None:
        """If the shell raises, the process ends and reports the error over the lifeline."""
        try:
            self._shell.run()
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


def main(spec_bytes: bytes, lifeline: socket.socket) -> HostedStage:
    """Runs a stage process; returns when its stage has been shut down.

    Args:
        spec_bytes: A `StageSpec` as JSON.
        lifeline: Its end-of-file means that the parent is gone. Receives the error of a stage that fails in a thread,
            or whose step takes too long.

    Returns:
        The stage. Deleting it destroys its engine, which takes seconds; the end of the process is faster.

    Raises:
        Exception: The stage could not start, or its engine broke; the caller reports it.
    """
    spec = _on_this_machine(msgspec.json.decode(spec_bytes, type=StageSpec))
    _set_up_process(spec)
    watchdog = Watchdog(partial(_exit_process, lifeline))
    stage = HostedStage(spec, lifeline, watchdog)
    stage.make_engine()
    watchdog.start()
    stage.start()
    stage.engine.run()
    stage.engine.close()
    stage.join()
    return stage


def _on_this_machine(spec: StageSpec) -> StageSpec:
    """Replaces `share` by what follows from it. Raises as `take_share`."""
    if spec.share is None:
        return spec
    instance, placement = take_share(spec.share, spec.instance.instance_id, spec.model)
    return msgspec.structs.replace(spec, instance=instance, placement=placement, share=None)


def _set_up_process(spec: StageSpec) -> None:
    hold(Path(spec.run_dir))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # vLLM leaves a rendezvous file in the temporary directory; it is removed with the run directory.
    tempfile.tempdir = spec.run_dir
    if spec.workers is None:  # Ray's may be on other machines.
        os.environ["VLLM_RPC_BASE_PATH"] = spec.run_dir  # likewise for the sockets of the engine's workers
    set_process_title(spec.instance.name, prefix="vllm_omni")
    decorate_logs(spec.instance.name)
    configure_process()
    bind_cores(spec.placement)
    if spec.stage.runtime.devices is not None:
        set_stage_gpu_devices(spec.stage.runtime.devices, spec.instance.label)  # type: ignore[arg-type]
