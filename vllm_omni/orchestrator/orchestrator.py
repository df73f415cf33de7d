# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline: admits requests, gives each to the stages that it needs, and reports how it went.

One thread does it all and sleeps while nothing happens. Payloads pass from stage to stage without coming here; only
the outputs of final stages do. Which stages a request needs, and what they are told, is decided by its caller.
"""

import collections
import contextlib
import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec
import zmq

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.errors import (
    InvalidRequestError,
    PipelineClosedError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    StageDeadError,
    StageExecutionError,
    StageStartError,
)
from vllm_omni.metrics.observer import PipelineObserver
from vllm_omni.metrics.stats import StageStats
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.messages import (
    ErrorMessage,
    FaultMessage,
    MessageError,
    OrchestratorInbound,
    OutputMessage,
    PayloadRef,
    PeerDownMessage,
    PeerUpMessage,
    ReadyMessage,
    RefundMessage,
    ResultMessage,
    StatsMessage,
    StatsQuery,
    recv_at_orchestrator,
)
from vllm_omni.orchestrator.request import PipelineRequest, RequestRecord
from vllm_omni.orchestrator.run_dir import RunDir
from vllm_omni.orchestrator.spec_factory import SpecFactory
from vllm_omni.orchestrator.supervisor import StageHealth, Supervisor
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.credit import Credit
from vllm_omni.stage.fork_server import ForkServer
from vllm_omni.stage.omni_stage import OmniStage, StageState
from vllm_omni.stage.spec import StagePlacement

logger = logging.getLogger("vllm.omni.orchestrator")


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
        placements: Mapping[int, StagePlacement] | None = None,
        observer: PipelineObserver | None = None,
        records_stats: bool = False,
        otlp_traces_endpoint: str | None = None,
    ) -> None:
        """
        Args:
            config: The stages.
            model: The checkpoint that all of them load from.
            shm_threshold_bytes: Payloads of at least this size go through shared memory, where an edge says nothing.
            init_timeout: Seconds that the stages may take to become ready, all together.
            server: Stages are forked from it. It is closed with the pipeline.
            placements: The cores of the stages, by stage id; those of other stages are left to the system.
            observer: Is told how requests go; closed with the pipeline.
            records_stats: The stages keep count of what they do.
            otlp_traces_endpoint: Where spans go.
        """
        self._config = config
        self._init_timeout = init_timeout
        self._server = server
        self._observer = observer or PipelineObserver()
        self._specs = SpecFactory(
            config, model, shm_threshold_bytes, placements or {}, records_stats, otlp_traces_endpoint
        )
        self._shm_threshold_bytes = shm_threshold_bytes
        self._started: Future[None] = Future()
        self._closing = False
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._number = 0
        self._admission = Admission(config.runtime.max_inflight, config.runtime.max_queued)
        self._records: dict[str, RequestRecord] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; requests that have ended stay in it until their time
        self._stages: dict[int, OmniStage] = {}
        self._stats_waiters: list[_StatsWaiter] = []
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

    def submit(self, request: PipelineRequest, *, wait: bool = True) -> None:
        """Starts a request; its `on_event` will be called with exactly one terminal event, after any others.

        Args:
            wait: Where as many requests as may wait are waiting: wait too, instead of raising.

        Raises:
            PipelineFullError: There is no room, and `wait` is false.
            PipelineClosedError: The pipeline is closed.
        """
        self._admission.put(request, wait)
        with contextlib.suppress(PipelineClosedError):  # Then the request ends with those that wait.
            self._command(lambda: self._on_arrival(request))

    def check_room(self) -> None:
        """Raises what `submit` would raise without `wait`, before anybody takes pains over a request."""
        self._admission.check_room()

    def release(self, request_id: str) -> None:
        """Makes room for another request. For callers to say when they have taken a request's last event."""
        self._admission.release(request_id)

    def give_up(self, request_ids: list[str]) -> None:
        """Aborts and releases requests whose events nobody waits for any more. Harmless for those that have ended."""
        with contextlib.suppress(PipelineClosedError):
            self.abort(request_ids)
        for request_id in request_ids:
            self._admission.release(request_id)

    def abort(self, request_ids: list[str]) -> None:
        """Stops working on these requests; those still running end with `RequestAbortedError`."""
        self._command(lambda: self._abort(request_ids))

    def health(self) -> list[StageHealth]:
        """How the stages are, in stage order."""
        return self._supervisor.health

    def activity(self) -> dict[str, int]:
        """How many requests each stage has work with, by stage name, in stage order."""
        records = list(self._records.values())
        return {
            stage.name: sum(record.is_working(stage.stage_id) for record in records)
            for stage in self._config.stage_args
        }

    def stats(self, timeout: float = 5.0) -> list[StageStats]:
        """What the stages have done so far, in stage order; a stage that does not answer in time is left out.

        Raises:
            PipelineClosedError: The pipeline is closed.
        """
        waiter = _StatsWaiter()
        self._command(lambda: self._ask_for_stats(waiter))
        waiter.done.wait(timeout)
        return [waiter.answers[stage_id] for stage_id in sorted(waiter.answers)]

    def close(self) -> None:
        """Stops all stages and removes all that the pipeline left in the system. May be called twice."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        """Runs a function on the orchestrator's thread, soon."""
        with self._lock:
            if self._closing:
                raise PipelineClosedError("the pipeline is closed; make a new one")
            self._commands.append(command)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The pipe is full of wake-ups already.
            os.write(self._wake_writer, b"\0")

    # The orchestrator's thread: its life.

    def _run(self) -> None:
        failure: BaseException | None = None
        with contextlib.ExitStack() as cleanup:
            try:
                self._open(cleanup)
                self._start_stages()
                self._started.set_result(None)
                while not self._closing:
                    self._run_commands()
                    self._act_on_time()
                    self._admit()
                    self._poll(self._next_due())
            except BaseException as error:
                failure = error
            self._end_requests()
        if not self._started.done():
            assert failure is not None
            self._started.set_exception(failure)
        elif failure is not None:
            logger.error("the pipeline ended on an error of its own", exc_info=failure)

    def _open(self, cleanup: contextlib.ExitStack) -> None:
        """Makes what the stages connect to; `cleanup` takes all of it down again, in the opposite order."""
        cleanup.callback(self._observer.close)
        cleanup.callback(self._server.close)
        self._run_dir = RunDir()
        cleanup.callback(self._run_dir.remove)
        context = zmq.Context()
        cleanup.callback(context.destroy, linger=0)
        self._inbound = context.socket(zmq.PULL)
        self._inbound.setsockopt(zmq.RCVHWM, 0)
        self._inbound.bind(self._run_dir.orchestrator_address)
        connector = ThresholdConnector(self._run_dir.path, "orchestrator", self._shm_threshold_bytes)
        self._channel = PayloadChannel(connector)
        self._stages = {
            stage_id: OmniStage(stage, self._run_dir, context, self._shm_threshold_bytes, self._make_credit(stage))
            for stage_id, stage in self._config.stages.items()
        }
        self._supervisor = Supervisor(
            [[self._stages[stage.stage_id] for stage in group] for group in self._config.processes],
            lambda stage: self._specs.make(stage, self._stages, self._run_dir),
            self._server,
            self._config.runtime.restart,
            self._config.runtime.stage_init_timeout,
            self._command,
        )
        cleanup.callback(self._supervisor.stop_all)

    def _make_credit(self, stage: OmniStageConfig) -> Credit:
        return Credit(self._config.max_queued(stage), self._config.runtime.defaults.high_watermark_bytes)

    def _start_stages(self) -> None:
        deadline = time.monotonic() + self._init_timeout
        self._supervisor.start_all(self._init_timeout)
        while not all(stage.is_ready for stage in self._stages.values()):
            due = self._supervisor.due
            self._poll(deadline if due is None else min(deadline, due))
            self._supervisor.act_on_time()
            self._check_start(deadline)
        self._supervisor.restarts = True

    def _check_start(self, deadline: float) -> None:
        if self._closing:
            raise PipelineClosedError("the pipeline was closed while it started")
        for stage in self._stages.values():
            if stage.death:
                raise StageStartError(f"{stage.label} failed to start: {stage.death}", stage.stage_id)
            if not stage.is_ready and time.monotonic() >= deadline:
                raise StageStartError(
                    f"{stage.label} was not ready after {self._init_timeout:g} s; give more time with init_timeout=",
                    stage.stage_id,
                )

    def _next_due(self) -> float | None:
        times = [self._supervisor.due, self._deadlines[0][0] if self._deadlines else None]
        return min((due for due in times if due is not None), default=None)

    def _poll(self, due: float | None) -> None:
        """Sleeps until something happens or is due, and takes note of what happened."""
        poller = zmq.Poller()
        poller.register(self._inbound, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        for group in self._supervisor.groups:
            if group.process is not None:
                poller.register(group.process.fileno(), zmq.POLLIN)
        timeout = None if due is None else math.ceil(max(0.0, due - time.monotonic()) * 1000)
        ready = dict(poller.poll(timeout))
        if self._wake_reader in ready:
            os.read(self._wake_reader, 65536)
        # What a stage said before it died counts, so messages come first.
        self._take_messages()
        for group in self._supervisor.find_dead({fd for fd in ready if isinstance(fd, int)}):
            for stage in group.stages:
                self._on_stage_down(stage)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _act_on_time(self) -> None:
        self._supervisor.act_on_time()
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._on_deadline(heapq.heappop(self._deadlines)[1])

    def _end_requests(self) -> None:
        with self._lock:
            self._closing = True
            os.close(self._wake_writer)
        self._run_commands()
        text = "the pipeline was closed"
        for request in self._admission.close():
            self._end_waiting(request, RequestAbortedError(text, request.external_id))
        for request_id, record in list(self._records.items()):
            self._fail(request_id, RequestAbortedError(text, record.request.external_id))
        for waiter in self._stats_waiters:
            waiter.done.set()
        os.close(self._wake_reader)

    # Requests.

    def _on_arrival(self, request: PipelineRequest) -> None:
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))

    def _admit(self) -> None:
        """Begins with those whose turn it is, as long as there is room."""
        while len(self._records) < self._config.runtime.max_inflight:
            request = self._admission.peek()
            if request is None or not self._takes_new(request):
                return
            self._begin(self._admission.take())

    def _takes_new(self, request: PipelineRequest) -> bool:
        """Whether the stages that it begins with have room for more."""
        return not any(
            self._stages[stage_id].credit.is_spent
            for stage_id in request.stages
            if not self._config.stages[stage_id].engine_input_source
        )

    def _begin(self, request: PipelineRequest) -> None:
        self._number += 1
        record = RequestRecord(request, self._number, self._config)
        self._records[request.request_id] = record
        modalities = next(iter(request.stages.values())).modalities
        headers = self._observer.request_started(request.request_id, modalities, request.trace_headers)
        for stage_request in request.stages.values():
            stage_request.trace_headers = headers
        # The last stages first, so that they know of a request before its data comes.
        for stage_id in sorted(request.stages, reverse=True):
            if request.request_id in self._records:
                self._submit_to(self._stages[stage_id], record)

    def _submit_to(self, stage: OmniStage, record: RequestRecord) -> None:
        """Tells the stage of a request, now or when it has been restarted."""
        request = record.request
        if stage.state is StageState.DEAD:
            self._fail_dead(record, stage)
        elif not stage.is_ready:
            record.unsubmitted.add(stage.stage_id)
        else:
            record.unsubmitted.discard(stage.stage_id)
            try:
                stage.submit(
                    request.stages[stage.stage_id],
                    record.number,
                    sources=record.sources(stage.stage_id),
                    targets=record.targets(stage.stage_id),
                    is_final=stage.stage_id in request.final_stages,
                    streams=request.streams,
                )
            except OSError as error:
                text = f"the request's data could not be handed over: {error}"
                self._fail(request.request_id, StageExecutionError(text, request.external_id, stage.stage_id))

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, lambda external_id: RequestAbortedError("the request was aborted", external_id))

    def _on_deadline(self, request_id: str) -> None:
        self._end(
            request_id,
            lambda external_id: RequestTimeoutError("the request was not complete at its deadline", external_id),
        )

    def _end(self, request_id: str, make_error: Callable[[str], RequestError]) -> None:
        """Ends a request, whether it works or waits. Does nothing if it has ended."""
        waiting = self._admission.withdraw(request_id)
        if waiting is not None:
            self._end_waiting(waiting, make_error(waiting.external_id))
        elif request_id in self._records:
            self._fail(request_id, make_error(self._records[request_id].request.external_id))

    def _end_waiting(self, request: PipelineRequest, error: RequestError) -> None:
        """Ends a request that no stage has heard of."""
        record = RequestRecord(request, 0, self._config)
        self._observer.request_started(request.request_id, [], request.trace_headers)
        self._report_failure(record, error)

    def _fail(self, request_id: str, error: RequestError) -> None:
        """Ends a request with an error and makes every stage forget it. Does nothing if it has ended."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        for stage_id in record.request.stages:
            self._stages[stage_id].abort([request_id])
        self._report_failure(record, error)

    def _report_failure(self, record: RequestRecord, error: RequestError) -> None:
        stage = None if error.stage_id is None else self._stages[error.stage_id].config.name
        self._observer.request_ended(record.summarize(type(error).__name__, stage))
        record.fail(error)

    def _fail_dead(self, record: RequestRecord, stage: OmniStage) -> None:
        error = StageDeadError(f"{stage.label} died: {stage.death}", record.request.external_id, stage.stage_id)
        self._fail(record.request.request_id, error)

    # Messages.

    def _take_messages(self) -> None:
        while True:
            try:
                received = recv_at_orchestrator(self._inbound)
            except MessageError as error:
                self._on_fault(error.sender, str(error))
                continue
            if received is None:
                return
            self._on_message(*received)

    def _on_message(self, message: OrchestratorInbound, frames: list[memoryview]) -> None:
        stage = self._stages[message.stats.stage_id if isinstance(message, StatsMessage) else message.stage_id]
        match message:
            case ReadyMessage():
                self._on_ready(stage)
            case OutputMessage():
                self._on_output(stage, message.request_id, message.payload, frames)
            case ResultMessage():
                self._on_result(stage, message, frames)
            case ErrorMessage():
                self._on_error(stage, message)
            case RefundMessage():
                stage.credit.refund(message.num_requests, message.num_bytes)
            case StatsMessage():
                self._on_stats(message.stats)
            case FaultMessage():
                self._on_fault(message.peer, message.error)

    def _on_ready(self, stage: OmniStage) -> None:
        self._supervisor.on_ready(stage)
        if stage.epoch == 0:
            return
        logger.warning("%s: serves again", stage.label)
        self._run_dir.remove_payloads(stage.stage_id, self._supervisor.dead_pid(stage))
        for record in sorted(self._records.values(), key=lambda record: record.number):
            if stage.stage_id in record.unsubmitted:
                self._submit_to(stage, record)
        self._tell_others(stage, PeerUpMessage(stage_id=stage.stage_id, epoch=stage.epoch))

    def _on_output(
        self, stage: OmniStage, request_id: str, payload: PayloadRef, frames: list[memoryview], is_last: bool = False
    ) -> None:
        record = self._records.get(request_id)
        if record is None:  # It failed meanwhile.
            self._channel.discard(payload)
            return
        try:
            piece = self._channel.get(StageOutput, payload, frames)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            text = f"the output of {stage.label} could not be read: {error}"
            self._fail(request_id, StageExecutionError(text, record.request.external_id, stage.stage_id))
        else:
            piece.is_last = is_last
            record.add_piece(stage.stage_id, piece)

    def _on_result(self, stage: OmniStage, message: ResultMessage, frames: list[memoryview]) -> None:
        if message.payload is not None:
            self._on_output(stage, message.request_id, message.payload, frames, is_last=True)
        record = self._records.get(message.request_id)
        if record is None:
            return
        record.finish(message.stage_id, message.metrics)
        for target, epoch in message.sent_to.items():
            if target in record.pending and epoch != self._stages[target].epoch:
                self._fail_dead(record, self._stages[target])  # It was sent to a process that is no more.
                return
        if not record.pending:
            del self._records[message.request_id]
            self._observer.request_ended(record.summarize())
            record.complete()

    def _on_error(self, stage: OmniStage, message: ErrorMessage) -> None:
        record = self._records.get(message.request_id)
        if record is None:
            return
        if message.dead_stage is not None:
            self._fail_dead(record, self._stages[message.dead_stage])
            return
        kind = InvalidRequestError if message.invalid else StageExecutionError
        error = kind(f"{stage.label}: {message.error}", record.request.external_id, stage.stage_id)
        error.stage_traceback = message.traceback
        self._fail(message.request_id, error)

    def _on_fault(self, peer: int | None, error: str) -> None:
        """A stage that cannot be understood is of no use: a request that it works on would wait for ever."""
        stage = None if peer is None else self._stages.get(peer)
        if stage is None:
            logger.error("a message from nobody that we know cannot be understood: %s", error)
        else:
            self._supervisor.kill(stage, f"a message from it could not be understood: {error}")

    # Stages.

    def _on_stage_down(self, stage: OmniStage) -> None:
        """Fails the requests that the stage's process held; those that it knew nothing of wait for the next one."""
        finished = []
        for record in list(self._records.values()):
            if stage.stage_id not in record.request.stages:
                continue
            if stage.stage_id not in record.pending:
                finished.append(record.request.request_id)
            elif stage.state is StageState.DEAD or self._has_begun(stage, record):
                self._fail_dead(record, stage)
            else:
                record.unsubmitted.add(stage.stage_id)
        self._tell_others(stage, PeerDownMessage(stage_id=stage.stage_id, finished=finished))
        for waiter in list(self._stats_waiters):
            self._drop_from(waiter, stage.stage_id)

    def _has_begun(self, stage: OmniStage, record: RequestRecord) -> bool:
        """Whether some input of the request was sent to the stage, as far as is known here.

        A source that hands over windows knows better, and will say so.
        """
        if stage.stage_id in record.unsubmitted:
            return False
        sources = record.sources(stage.stage_id)
        return not sources or any(source not in record.pending for source in sources)

    def _tell_others(self, stage: OmniStage, message: PeerDownMessage | PeerUpMessage) -> None:
        for other in self._stages.values():
            if other is not stage:
                other.tell(message)

    def _ask_for_stats(self, waiter: "_StatsWaiter") -> None:
        asked = [stage for stage in self._stages.values() if stage.is_ready]
        waiter.missing = {stage.stage_id for stage in asked}
        self._stats_waiters.append(waiter)
        for stage in asked:
            stage.tell(StatsQuery())

    def _on_stats(self, stats: StageStats) -> None:
        self._observer.stage_stats(stats)
        for waiter in list(self._stats_waiters):
            waiter.answers[stats.stage_id] = stats
            self._drop_from(waiter, stats.stage_id)

    def _drop_from(self, waiter: "_StatsWaiter", stage_id: int) -> None:
        waiter.missing.discard(stage_id)
        if not waiter.missing:
            self._stats_waiters.remove(waiter)
            waiter.done.set()


class _StatsWaiter:
    """Somebody who waits for the figures of all stages."""

    def __init__(self) -> None:
        self.missing: set[int] = set()
        self.answers: dict[int, StageStats] = {}
        self.done = threading.Event()
