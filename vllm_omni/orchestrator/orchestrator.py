# SPDX-License-Identifier: Apache-2.0
"""The request table and the stages of one pipeline.

One thread owns both. It starts the stages, hands each request to the stages that it needs, gathers what the final
stages return, and fails what cannot be completed. Tensors between stages do not pass through it. It knows no model, and
not whether its callers wait or await.
"""

import collections
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.errors import (
    InvalidRequestError,
    PipelineClosedError,
    RequestAbortedError,
    RequestError,
    StageDeadError,
    StageExecutionError,
    StageStartError,
)
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.messages import (
    PROTOCOL_VERSION,
    ErrorMessage,
    ReadyMessage,
    ResultMessage,
    recv_at_orchestrator,
)
from vllm_omni.orchestrator.run_dir import RunDir
from vllm_omni.outputs import OmniRequestOutput, StageMetrics, StageOutput, make_omni_request_output
from vllm_omni.stage.fork_server import ForkServer
from vllm_omni.stage.omni_stage import OmniStage
from vllm_omni.stage.spec import StageSpec

logger = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 10.0


@dataclass(slots=True)
class TerminalEvent:
    """How a request ended: with the outputs of its final stages, in stage order, or with an error."""

    request_id: str
    outputs: list[OmniRequestOutput] = field(default_factory=list)
    error: RequestError | None = None


@dataclass(slots=True)
class PipelineRequest:
    """A request, ready for the stages.

    Attributes:
        stages: What each stage that it needs is told, by stage id.
        final_stages: The stages whose output the caller receives.
        on_done: Takes the request's one terminal event, on the orchestrator's thread; must not block.
    """

    request_id: str
    stages: dict[int, StageRequest]
    final_stages: list[int]
    on_done: Callable[[TerminalEvent], None]


@dataclass(slots=True)
class _Record:
    """A running request."""

    request: PipelineRequest
    pending: set[int]
    outputs: dict[int, StageOutput] = field(default_factory=dict)
    metrics: dict[int, StageMetrics] = field(default_factory=dict)


class Orchestrator:
    """Runs a pipeline. Its methods may be called from any thread."""

    def __init__(
        self,
        config: PipelineConfig,
        model: str,
        *,
        shm_threshold_bytes: int,
        init_timeout: float,
        server: ForkServer,
        num_threads: int | None = None,
    ) -> None:
        """
        Args:
            config: The stages.
            model: The checkpoint that all of them load from.
            shm_threshold_bytes: Payloads of at least this size go through shared memory, where an edge says nothing.
            init_timeout: Seconds that the stages may take to become ready.
            server: Stages are forked from it. It is closed with the pipeline.
            num_threads: Threads for tensor operations in each stage; None leaves it to the libraries.
        """
        self._config = config
        self._model = model
        self._shm_threshold_bytes = shm_threshold_bytes
        self._init_timeout = init_timeout
        self._server = server
        self._num_threads = num_threads
        self._started: Future[None] = Future()
        self._closing = False
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._number = 0
        self._records: dict[str, _Record] = {}
        self._stages: dict[int, OmniStage] = {}
        self._lock = threading.Lock()
        # A daemon: at interpreter exit it must outlive the main thread until `close` has run.
        self._thread = threading.Thread(target=self._run, name="omni-orchestrator", daemon=True)
        self._thread.start()

    # Called from any thread.

    def wait_until_started(self) -> None:
        """
        Raises:
            StageStartError: A stage failed, or took too long. Nothing is left running.
        """
        self._started.result()

    def submit(self, request: PipelineRequest) -> None:
        """Starts a request; its `on_done` will be called exactly once.

        Raises:
            PipelineClosedError: The pipeline is closed.
        """
        self._command(lambda: self._submit(request))

    def abort(self, request_ids: list[str]) -> None:
        """Stops working on these requests; those still running end with `RequestAbortedError`."""
        self._command(lambda: self._abort(request_ids))

    def close(self) -> None:
        """Stops all stages and removes all that the pipeline left in the system. May be called twice."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.write(self._wake_writer, b"\0")
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise PipelineClosedError("the pipeline is closed; make a new one")
            self._commands.append(command)
            os.write(self._wake_writer, b"\0")

    # The orchestrator's thread.

    def _run(self) -> None:
        failure: BaseException | None = None
        with contextlib.ExitStack() as cleanup:
            try:
                self._start_stages(cleanup)
                self._started.set_result(None)
                while not self._closing:
                    self._poll(None)
                    self._run_commands()
            except BaseException as error:
                failure = error
            self._end_requests()
        if not self._started.done():
            assert failure is not None
            self._started.set_exception(failure)
        elif failure is not None:
            logger.error("the pipeline ended on an error of its own", exc_info=failure)

    def _start_stages(self, cleanup: contextlib.ExitStack) -> None:
        """Brings all stages up; `cleanup` takes them down again, in the opposite order."""
        deadline = time.monotonic() + self._init_timeout
        cleanup.callback(self._server.close)
        self._run_dir = RunDir()
        cleanup.callback(self._run_dir.remove)
        self._context = zmq.Context()
        cleanup.callback(self._context.destroy, linger=0)
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.setsockopt(zmq.RCVHWM, 0)
        self._inbound.bind(self._run_dir.orchestrator_address)
        connector = ThresholdConnector(self._run_dir.path, "orchestrator", self._shm_threshold_bytes)
        self._channel = PayloadChannel(connector)
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        cleanup.callback(self._stop_stages)
        self._spawn_stages(deadline)
        while not all(stage.ready for stage in self._stages.values()):
            self._poll(deadline)
            self._check_start(deadline)

    def _spawn_stages(self, deadline: float) -> None:
        for stage in self._config.stage_args:
            spec = StageSpec(
                stage=stage,
                model=self._model,
                targets={
                    target: self._config.shm_threshold_bytes(stage, target, self._shm_threshold_bytes)
                    for target in self._config.targets[stage.stage_id]
                },
                shm_threshold_bytes=self._shm_threshold_bytes,
                run_dir=str(self._run_dir.path),
                num_threads=self._num_threads,
            )
            handle = OmniStage(spec, self._run_dir, self._context)
            self._stages[stage.stage_id] = handle
            try:
                handle.spawn(self._server, deadline - time.monotonic())
            except (EOFError, TimeoutError) as error:
                raise StageStartError(f"{handle.label} could not be started: {error}", stage.stage_id) from error
            self._poller.register(handle.fileno(), zmq.POLLIN)

    def _check_start(self, deadline: float) -> None:
        if self._closing:
            raise PipelineClosedError("the pipeline was closed while it started")
        for stage in self._stages.values():
            if stage.death is not None:
                raise StageStartError(f"{stage.label} failed to start: {stage.death}", stage.config.stage_id)
            if not stage.ready and time.monotonic() >= deadline:
                raise StageStartError(
                    f"{stage.label} was not ready after {self._init_timeout:g} s; give more time with init_timeout=",
                    stage.config.stage_id,
                )

    def _poll(self, deadline: float | None) -> None:
        """Sleeps until something happens or the deadline is reached, and takes note of what happened."""
        timeout = None if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
        ready = dict(self._poller.poll(timeout))
        if self._wake_reader in ready:
            os.read(self._wake_reader, 65536)
        while (received := recv_at_orchestrator(self._inbound)) is not None:
            self._on_message(*received)
        for stage in self._stages.values():
            if stage.alive and stage.fileno() in ready:
                self._on_stage_death(stage)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _submit(self, request: PipelineRequest) -> None:
        self._number += 1
        self._records[request.request_id] = _Record(request, pending=set(request.stages))
        dead = next((self._stages[i] for i in request.stages if not self._stages[i].alive), None)
        if dead is not None:
            self._fail(request.request_id, _dead_stage_error(dead, request.request_id))
            return
        try:
            # The last stages first, so that they know of a request before its data comes.
            for stage_id in sorted(request.stages, reverse=True):
                self._submit_to(stage_id, request)
        except OSError as error:
            message = f"the request's data could not be handed over: {error}"
            self._fail(request.request_id, StageExecutionError(message, request.request_id))

    def _submit_to(self, stage_id: int, request: PipelineRequest) -> None:
        self._stages[stage_id].submit(
            request.stages[stage_id],
            self._number,
            sources=[i for i in self._config.stages[stage_id].engine_input_source if i in request.stages],
            targets=[i for i in self._config.targets[stage_id] if i in request.stages],
            is_final=stage_id in request.final_stages,
        )

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._fail(request_id, RequestAbortedError(f"request {request_id} was aborted", request_id))

    def _on_message(self, message: ReadyMessage | ResultMessage | ErrorMessage, frames: list[memoryview]) -> None:
        stage = self._stages[message.stage_id]
        match message:
            case ReadyMessage():
                self._on_ready(stage, message)
            case ResultMessage():
                self._on_result(stage, message, frames)
            case ErrorMessage():
                self._fail(message.request_id, _stage_error(stage, message))

    def _on_ready(self, stage: OmniStage, message: ReadyMessage) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            raise StageStartError(
                f"{stage.label} speaks protocol {message.protocol_version}, this process {PROTOCOL_VERSION}; "
                "install one version of vllm-omni everywhere",
                stage.config.stage_id,
            )
        stage.ready = True

    def _on_result(self, stage: OmniStage, message: ResultMessage, frames: list[memoryview]) -> None:
        stage.held.discard(message.request_id)
        record = self._records.get(message.request_id)
        if record is None:  # It failed meanwhile.
            if message.payload is not None:
                self._channel.discard(message.payload)
            return
        record.pending.discard(message.stage_id)
        record.metrics[message.stage_id] = message.metrics
        if message.payload is not None:
            try:
                record.outputs[message.stage_id] = self._channel.get(StageOutput, message.payload, frames)
            except (OSError, msgspec.MsgspecError) as error:
                text = f"the output of {stage.label} could not be read: {error}"
                self._fail(message.request_id, StageExecutionError(text, message.request_id, message.stage_id))
                return
        if not record.pending:
            self._complete(record)

    def _complete(self, record: _Record) -> None:
        request = self._records.pop(record.request.request_id).request
        metrics = [record.metrics[stage_id] for stage_id in sorted(record.metrics)]
        outputs = [
            make_omni_request_output(output, self._config.stages[stage_id].final_output_type or "", metrics)
            for stage_id, output in sorted(record.outputs.items())
        ]
        request.on_done(TerminalEvent(request.request_id, outputs))

    def _on_stage_death(self, stage: OmniStage) -> None:
        self._poller.unregister(stage.fileno())
        stage.on_death()
        if not stage.ready:
            return  # `_check_start` reports it.
        logger.error("%s died: %s", stage.label, stage.death)
        for request_id in list(stage.held):
            self._fail(request_id, _dead_stage_error(stage, request_id))

    def _fail(self, request_id: str, error: RequestError) -> None:
        """Ends a request with an error and makes every stage forget it. Does nothing if it has ended."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        for stage_id in record.request.stages:
            self._stages[stage_id].abort([request_id])
        record.request.on_done(TerminalEvent(request_id, error=error))

    def _end_requests(self) -> None:
        with self._lock:
            self._closing = True
            os.close(self._wake_writer)
        self._run_commands()
        for request_id in list(self._records):
            self._fail(request_id, RequestAbortedError(f"request {request_id}: the pipeline was closed", request_id))
        os.close(self._wake_reader)

    def _stop_stages(self) -> None:
        for stage in self._stages.values():
            stage.ask_to_stop()
        deadline = time.monotonic() + _SHUTDOWN_GRACE_S
        for stage in self._stages.values():
            stage.stop(deadline)


def _stage_error(stage: OmniStage, message: ErrorMessage) -> RequestError:
    kind = InvalidRequestError if message.invalid else StageExecutionError
    error = kind(f"{stage.label}: {message.error}", message.request_id, message.stage_id)
    error.stage_traceback = message.traceback
    return error


def _dead_stage_error(stage: OmniStage, request_id: str) -> StageDeadError:
    return StageDeadError(f"{stage.label} died: {stage.death}", request_id, stage.config.stage_id)
