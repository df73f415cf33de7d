# SPDX-License-Identifier: Apache-2.0
"""The life of a stage process: for each stage in it an engine, and an IO thread around that.

Most processes hold one stage. It knows no kind of engine and no model.
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

from vllm_omni.distributed.run_dir import hold
from vllm_omni.metrics.recorder import NullRecorder, StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.stage.cores import bind_cores
from vllm_omni.stage.engines import make_stage_engine
from vllm_omni.stage.engines.base import Outbox, StageEngine, Started
from vllm_omni.stage.placement import alone_on_devices, set_stage_gpu_devices
from vllm_omni.stage.shell import StageShell
from vllm_omni.stage.spec import StageSpec
from vllm_omni.stage.watchdog import Watchdog

_T = TypeVar("_T")


class HostedStage:
    """One stage of this process. Its IO thread runs from the beginning, and sees if the parent goes."""

    engine: StageEngine

    def __init__(self, spec: StageSpec, lifeline: socket.socket, watchdog: Watchdog) -> None:
        self.spec = spec
        self._watchdog = watchdog
        self.label = f"stage {spec.stage.stage_id} ({spec.stage.name})"
        self._lifeline = lifeline
        self._outbox = Outbox()
        recorder = StageRecorder if spec.records_stats else NullRecorder
        self._recorder = recorder(spec.stage.stage_id, spec.stage.name)
        self._tracer = make_stage_tracer(spec.otlp_traces_endpoint)
        self._shell = StageShell(spec, lifeline, self._outbox, self._recorder, self._tracer)
        self._threads: list[threading.Thread] = []
        self._start_thread("io", self._shell.run)

    def make_engine(self) -> None:
        stage = self.spec.stage
        self.engine = make_stage_engine(stage, self.spec.model, self._outbox)
        self.engine.recorder = self._recorder
        if limit_s := stage.runtime.step_timeout_s:
            self.engine.step_timer = self._watchdog.watch(self.label, limit_s, self.engine.always_compiles)
        self._shell.attach(self.engine, load_stage_input_processor(stage, self.spec.model))

    def start(self) -> None:
        """Starts the engine; the stage takes requests from now on."""
        with alone_on_devices(self.spec.run_dir, self.spec.stage):
            self.engine.start()
        self._outbox.put(Started())

    def run_in_thread(self) -> None:
        self._start_thread("engine", self.engine.run)

    def join(self) -> None:
        """Waits until its threads have ended, which they do when the stage is told to."""
        for thread in self._threads:
            thread.join()
        self._tracer.close()

    def _start_thread(self, what: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self.run_or_die, args=(work,), name=f"{self.spec.stage.name}-{what}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def run_or_die(self, work: Callable[[], _T]) -> _T:
        """Does a part of the stage's work. If it fails, the process ends with the stage's error as its last words."""
        try:
            return work()
        except BaseException as error:
            try:
                traceback.print_exc()
            finally:
                _die(self._lifeline, f"{self.label}: {type(error).__name__}: {error}")


def _die(lifeline: socket.socket, last_words: str) -> NoReturn:
    try:
        sys.stdout.flush()
        lifeline.sendall(last_words.encode())
    finally:
        os._exit(1)


def main(spec_bytes: bytes, lifeline: socket.socket) -> list[HostedStage]:
    """The whole life of a stage process; returns when every stage in it was told to stop.

    Args:
        spec_bytes: A list of `StageSpec` as JSON.
        lifeline: Its end-of-file says that the parent is gone. Gets the last words of a stage that fails in a thread,
            or whose step takes too long.

    Returns:
        The stages. Whoever lets go of them has their engines taken apart, which takes seconds; the end of the process
        does it at once.

    Raises:
        Exception: A stage that has the process to itself could not start, or its engine broke; its parent is told.
    """
    specs = msgspec.json.decode(spec_bytes, type=list[StageSpec])
    _set_up_process(specs)
    watchdog = Watchdog(partial(_die, lifeline))
    stages = [HostedStage(spec, lifeline, watchdog) for spec in specs]
    if len(stages) == 1:
        _run_alone(stages[0], watchdog)
    else:
        _run_together(stages, watchdog)
    return stages


def _run_alone(stage: HostedStage, watchdog: Watchdog) -> None:
    """The engine has the main thread."""
    stage.make_engine()
    watchdog.start()
    stage.start()
    stage.engine.run()
    stage.engine.close()
    stage.join()


def _run_together(stages: list[HostedStage], watchdog: Watchdog) -> None:
    """Every engine has a thread of its own.

    They start one after the other, and all before any works: vLLM sets defaults of the whole process while it loads.
    """
    for stage in stages:
        stage.run_or_die(stage.make_engine)
    watchdog.start()
    in_order = sorted(stages, key=lambda stage: not stage.run_or_die(stage.engine.must_start_first))
    for stage in in_order:
        stage.run_or_die(stage.start)
    for stage in stages:
        stage.run_in_thread()
    for stage in stages:
        stage.join()
    for stage in reversed(in_order):
        stage.engine.close()


def _set_up_process(specs: list[StageSpec]) -> None:
    hold(Path(specs[0].run_dir))
    # vLLM leaves a rendezvous file in the temporary directory; here it goes with everything else.
    tempfile.tempdir = specs[0].run_dir
    name = "+".join(spec.stage.name for spec in specs)
    set_process_title(name, prefix="vllm_omni")
    decorate_logs(name)
    bind_cores(specs[0].placement)
    for spec in specs:  # Those that name devices name the same.
        if spec.stage.runtime.devices is not None:
            set_stage_gpu_devices(spec.stage.runtime.devices, f"stage {spec.stage.stage_id} ({spec.stage.name})")
            break


def make_stage_tracer(otlp_traces_endpoint: str | None) -> StageTracer:
    """The tracer of a stage; one that does nothing where there is no endpoint.

    Raises:
        VllmRequirementError: OpenTelemetry is not installed.
    """
    if otlp_traces_endpoint is None:
        return StageTracer()
    from vllm_omni.metrics.otel import OtelStageTracer

    return OtelStageTracer(otlp_traces_endpoint)
