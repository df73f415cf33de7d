# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline: admits requests, submits each to the stages that it needs, and reports their events.

One thread does everything and sleeps while nothing happens. Payloads go directly from stage to stage; only the outputs
of final stages come here. The caller decides which stages a request needs, and what they receive.
"""

import collections
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from vllm_omni.config.stage_config import NIXL, ConnectorConfig, OmniStageConfig, PipelineConfig
from vllm_omni.control import AnyVerb
from vllm_omni.distributed.connectors import PayloadReceiver, remove_payloads, remove_segments
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.curve import CurveKeys
from vllm_omni.distributed.inbound import Inbound
from vllm_omni.distributed.messages import (
    AliveMessage,
    ControlResult,
    ErrorMessage,
    FaultMessage,
    MessageError,
    MetricsMessage,
    OrchestratorInbound,
    OutputMessage,
    ReadyMessage,
    RefundMessage,
    ResultMessage,
    StatsMessage,
    TextsMessage,
    recv_at_orchestrator,
)
from vllm_omni.distributed.network import Network, NetworkSpec
from vllm_omni.distributed.run_dir import RunDir, orchestrator_address
from vllm_omni.distributed.wake_up import WakeUp
from vllm_omni.errors import PipelineClosedError, PipelineStartError, StageStartError
from vllm_omni.inputs import StageInput
from vllm_omni.launch.cluster import Cluster
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.launch.launcher import ClusterLauncher, Launcher, LocalLauncher
from vllm_omni.launch.nodes import Nodes
from vllm_omni.launch.spec_factory import Site, SpecFactory, StageWeights
from vllm_omni.launch.stage_handle import OmniStage, StageHandle
from vllm_omni.launch.supervisor import SilenceWatch, Supervisor
from vllm_omni.metrics.observer import CompositeObserver, PipelineObserver
from vllm_omni.metrics.stats import SpeculationCounts, StageHealth, StageState, StageStats
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.control_calls import ControlCalls
from vllm_omni.orchestrator.request import PipelineRequest
from vllm_omni.orchestrator.router import RequestRouter
from vllm_omni.placement.spec import StagePlacement

logger = logging.getLogger("vllm.omni.orchestrator")

_CLOSED = "the pipeline was closed"
_FAILED = "the pipeline ended on an internal error (see the log)"
_FORKED = "the pipeline belongs to the process that this one is a fork of"
_OPEN_FILES, _OPEN_FILES_PER_STAGE = 16, 8
"""Upper bounds: for ZMQ's context, and for the sockets, connections and start of each stage."""


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
        observers: Sequence[PipelineObserver] = (),
        otlp_traces_endpoint: str | None = None,
        log_stats: bool = False,
        cluster: Cluster | None = None,
    ) -> None:
        """
        Args:
            config: The stages.
            model: The checkpoint that all of them load from.
            shm_threshold_bytes: Payloads of at least this size go through shared memory, unless an edge sets another.
            init_timeout: Seconds that the stages may take to become ready, all together.
            server: Stages are forked from it. It is closed with the pipeline, and if this fails.
            placements: The cores of the replicas, by instance id; those of others are left to the system.
            observers: Notified of requests; closed as the server is.
            otlp_traces_endpoint: Where stages send spans.
            log_stats: Whether observers get the metrics of the stages' engines.
            cluster: The machines that stages run on; None: this one. Closed as the server is.

        Raises:
            PipelineStartError: The system refuses files, sockets or threads. Nothing is left open.
        """
        self._config = config
        self._init_timeout = init_timeout
        self._server = server
        self._observer = CompositeObserver(observers)
        self._connector = ConnectorConfig(
            name="SharedMemoryConnector", extra={"shm_threshold_bytes": shm_threshold_bytes}
        )
        self._specs = SpecFactory(config, model, self._connector, otlp_traces_endpoint, log_stats)
        self._placements = placements or {}
        self._cluster = cluster
        self._pid = os.getpid()
        self._started: Future[None] = Future()
        self._closing = False
        self._start_time = time.monotonic()
        self._error: BaseException | None = None
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._admission = Admission(config.runtime.max_inflight, config.runtime.max_queued)
        self._drained: list[Future[None]] = []  # of those that wait until no request runs
        self._stats: dict[int, StageStats] = {}  # by instance id; replaced as a whole, so any thread may read it
        # Reentrant: the garbage collector may close an unreferenced pipeline while this thread holds the lock.
        self._lock = threading.RLock()
        # A daemon: at interpreter exit it must outlive the main thread until `close` has run.
        self._thread = threading.Thread(target=self._run, name="omni-orchestrator", daemon=True)
        self._cleanup = contextlib.ExitStack()
        try:
            self._open(self._cleanup)
            self._thread.start()
        except BaseException as error:
            self._cleanup.close()
            if isinstance(error, (OSError, zmq.ZMQError, RuntimeError)):  # RuntimeError: no thread can be started.
                raise PipelineStartError.from_system(error) from error
            raise

    # Called from any thread.

    def wait_until_started(self) -> None:
        """
        Raises:
            StageStartError: A stage failed, or took too long. Nothing is left running.
        """
        self._started.result()

    def submit(self, request: PipelineRequest, *, wait: bool = True, cancelled: threading.Event | None = None) -> None:
        """Starts a request; its `on_event` will be called with exactly one terminal event, after any others.

        Args:
            wait: Where as many requests as may wait are waiting: wait too, instead of raising.
            cancelled: Once it is set, and `cancel` was called with this request, stops waiting.

        Raises:
            PipelineFullError: There is no room, and `wait` is false, or the request was cancelled.
            PipelineClosedError: The pipeline is closed, or belongs to another process.
        """
        self.check_process()
        self._admission.put(request, wait, cancelled)
        with contextlib.suppress(PipelineClosedError):  # The request ends with those that wait.
            self._command(lambda: self._router.watch_deadline(request))

    def extend(self, request: PipelineRequest, stage_id: int, stage_input: StageInput, is_last: bool) -> None:
        """More input of a submitted request, for a stage that reads the prompt. No effect if it has ended."""
        with contextlib.suppress(PipelineClosedError):
            self._command(lambda: self._router.extend(request, stage_id, stage_input, is_last))

    def check_room(self, num_coming: int = 0, num_sequences: int = 1) -> None:
        """Raises what `submit` would raise without `wait`: for callers to check before they prepare a request.

        Args:
            num_coming: Sequences of requests that the caller is preparing, and submits before this one.
            num_sequences: Of this one.
        """
        self.check_process()
        self._admission.check_room(num_coming, num_sequences)

    def would_wait(self, num_coming: int = 0) -> bool:
        """Whether a request would not start at once, or requests wait in a stage. `num_coming` as of `check_room`."""
        if self.is_paused or self._admission.would_wait(num_coming):
            return True
        return any(stats.queue_depth for stats in self.stats())

    def watch_speculations(self, counts: SpeculationCounts) -> None:
        """Shows the counts of realtime sessions in its metrics."""
        self._observer.watch_speculations(counts)

    def release(self, request_id: str) -> None:
        """Makes room for another request. Called when the caller has received a request's last event."""
        if not self._is_forked:
            self._admission.release(request_id)

    def cancel(self, request_ids: list[str]) -> None:
        """Aborts and releases requests whose events are not read any more. No effect on those that have ended."""
        with contextlib.suppress(PipelineClosedError):
            self.abort(request_ids)
        for request_id in request_ids:
            self.release(request_id)

    def abort(self, request_ids: list[str]) -> None:
        """Aborts these requests; those still running end with `RequestAbortedError`."""
        self._command(lambda: self._router.abort(request_ids))

    def control(self, verb: AnyVerb, stage_ids: Sequence[int], timeout: float) -> Future[list[Any]]:
        """Has all replicas of these stages do something. Arguments and result are those of `ControlCalls.call`."""
        result = _future()
        self._command(lambda: self._control_calls.call(verb, stage_ids, timeout, result))
        return result

    @property
    def model(self) -> str:
        """The checkpoint of the pipeline."""
        return self._specs.model

    @property
    def log_stats(self) -> bool:
        """Whether observers get the metrics of the stages' engines."""
        return self._specs.log_stats

    def weight_version(self, stage_id: int) -> str:
        """The version of the weights that the stage has to have."""
        return self._specs.weights.get(stage_id, StageWeights()).version

    @property
    def is_frozen(self) -> bool:
        """Whether the stages compute no steps, and keep their requests."""
        return self._control_calls.is_frozen

    def pause(self, *, aborts: bool = False) -> Future[None]:
        """Starts no further request; those that come wait, as far as the queue has room.

        Args:
            aborts: End those that run with `RequestAbortedError`.

        Returns:
            Done when no request runs, or `resume` was called.
        """
        drained = _future()

        def pause() -> None:
            self._router.is_paused = True
            self._drained.append(drained)
            if aborts:
                self._router.abort_all()

        self._command(pause)
        return drained

    def resume(self) -> Future[None]:
        """Starts requests again. Returns: done when it does."""
        resumed = _future()

        def resume() -> None:
            self._router.is_paused = False
            self._end_drained()
            resumed.set_result(None)

        self._command(resume)
        return resumed

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not since."""
        return self._router.is_paused

    def abort_external(self, external_ids: Collection[str] | None) -> Future[int]:
        """Aborts all requests with these ids of their callers; None: all. Returns how many."""
        count = _future()

        def abort() -> None:
            request_ids = self._router.find_external(external_ids)
            self._router.abort(request_ids)
            count.set_result(len(request_ids))

        self._command(abort)
        return count

    def check_process(self) -> None:
        """
        Raises:
            PipelineClosedError: This process is a fork of the pipeline's.
        """
        if self._is_forked:
            raise PipelineClosedError(f"{_FORKED}; make a new one")

    @property
    def is_running(self) -> bool:
        """False once it is closed, or has ended on an error of its own; and in a fork of its process."""
        return not self._closing and self._thread.is_alive()  # A fork has none of the threads.

    @property
    def error(self) -> BaseException | None:
        """The error of its own that ended it; None if there was none."""
        return self._error if self._started.done() else None

    def health(self) -> list[StageHealth]:
        """The state of each replica, in stage order; all are dead once it does not run any more."""
        health = self._supervisor.health
        if self.is_running:
            return health
        return [replace(stage, state=StageState.DEAD.value, last_death=self._why_ended) for stage in health]

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the pipeline's: without its threads, perhaps with locks that they held."""
        return os.getpid() != self._pid

    @property
    def _why_ended(self) -> str:
        if self._is_forked:
            return _FORKED
        return _CLOSED if self._error is None else _FAILED

    def activity(self) -> dict[str, int]:
        """The number of requests that each stage works on, by stage name, in stage order."""
        return self._router.activity()

    def stats(self) -> list[StageStats]:
        """The last snapshot of each replica, in stage order; one without a process is left out.

        Raises:
            PipelineClosedError: The pipeline is closed.
        """
        self.check_process()
        if self._closing:
            raise PipelineClosedError(f"{self._why_ended}; make a new one")
        return sorted(self._stats.values(), key=lambda stats: (stats.stage_id, stats.replica))

    def close(self) -> None:
        """Stops all stages and removes their files. May be called twice. No effect in a fork of its process."""
        if self._is_forked:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake_up.set()
        if threading.current_thread() is self._thread:  # The garbage collector may call this on any thread.
            return
        if not self._started.done():
            self._launcher.close()  # The start may wait for the fork server, or for a machine.
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        """Runs a function on the orchestrator's thread, soon."""
        self.check_process()
        with self._lock:
            if self._closing:
                raise PipelineClosedError(f"{self._why_ended}; make a new one")
            self._commands.append(command)
            self._wake_up.set()

    # The orchestrator's thread.

    def _run(self) -> None:
        try:
            with self._cleanup:
                try:
                    self._start_stages()
                    self._started.set_result(None)
                    self._serve()
                except BaseException as error:
                    self._error = error  # Before the cleanup, which ends all requests, and may take seconds.
                    if self._started.done():
                        logger.critical("the pipeline ends on an error of its own", exc_info=error)
                    raise
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            elif error is not self._error:
                logger.error("the pipeline could not be cleaned up", exc_info=error)

    def _serve(self) -> None:
        while not self._closing:
            self._run_commands()
            self._supervisor.on_timer()
            self._silence.on_timer()
            self._control_calls.on_timer(time.monotonic())
            self._router.end_overdue(time.monotonic())
            self._router.admit()
            if self._router.is_idle:
                self._end_drained()
            self._poll(self._next_due())

    def _open(self, cleanup: contextlib.ExitStack) -> None:
        """Creates sockets, directory and handles; `cleanup` closes them in the opposite order."""
        cleanup.callback(self._observer.close)
        if self._cluster is not None:
            cleanup.callback(self._cluster.close)
        cleanup.callback(self._server.close)
        self._wake_up = WakeUp()
        cleanup.callback(self._wake_up.close)
        self._run_dir = RunDir()
        cleanup.callback(self._run_dir.remove)
        _check_open_files(_OPEN_FILES + _OPEN_FILES_PER_STAGE * len(self._config.instances))
        context = zmq.Context()
        cleanup.callback(context.destroy, linger=0)
        local = context.socket(zmq.PULL)
        local.setsockopt(zmq.RCVHWM, 0)
        local.bind(orchestrator_address(self._run_dir.path))
        sockets = [local]
        self._launcher = self._open_launcher(context, cleanup)
        if self._network is not None:
            sockets.append(self._network.inbound)
        fetcher = None if self._network is None else self._network.fetcher
        self._inbound = Inbound(sockets, recv_at_orchestrator, self._is_current, fetcher)
        copy_thread = ThreadPoolExecutor(1, "omni-copy")  # Its thread starts with the first copy.
        cleanup.callback(copy_thread.shutdown)
        self._stages = {
            instance_id: OmniStage(
                instance,
                self._run_dir,
                context,
                self._connector,
                self._make_credit(instance.stage),
                copy_thread,
                self._command,
                lambda stage, request_id, error: self._router.on_send_error(stage, request_id, error),
                self._network,
            )
            for instance_id, instance in self._config.instances.items()
        }
        payloads = PayloadReceiver(self._run_dir.path)
        self._router = RequestRouter(self._config, self._stages, self._admission, payloads, self._observer)
        self._control_calls = ControlCalls(self._stages, self._specs.weights, self._on_weights)
        self._supervisor = Supervisor(
            list(self._stages.values()),
            self._launcher,
            self._config.runtime.restart,
            self._config.runtime.stage_init_timeout,
            self._command,
            self._on_stage_down,
            self._router.on_stage_waits,
        )
        self._silence = SilenceWatch(self._supervisor)
        cleanup.callback(self._supervisor.stop_all)
        cleanup.callback(self._end_requests)

    def _open_launcher(self, context: zmq.Context, cleanup: contextlib.ExitStack) -> Launcher:
        path = self._run_dir.path
        self._network = None
        if self._cluster is None:
            site = Site(path, orchestrator_address(path), placements=self._placements)
            return LocalLauncher(self._server, self._specs, site)
        runtime = self._config.runtime
        spec = NetworkSpec(
            host=self._cluster.host,
            keys=CurveKeys.make(),
            encrypts_payloads=runtime.encrypt == "all",
            uses_nixl=any(connector.name == NIXL for connector in runtime.connectors.values()),
        )
        self._network = Network(context, msgspec.structs.replace(spec, uses_nixl=False))  # Only between stages.
        cleanup.callback(self._network.close)
        nodes = Nodes(context, spec.host, spec.keys)
        cleanup.callback(nodes.close)
        return ClusterLauncher(
            self._cluster, self._server, self._specs, nodes, self._run_dir, spec, self._network.address
        )

    def _make_credit(self, stage: OmniStageConfig) -> Credit:
        return Credit(self._config.max_queued(stage), self._config.runtime.defaults.high_watermark_bytes)

    def _start_stages(self) -> None:
        deadline = time.monotonic() + self._init_timeout
        logger.info("starting %s", ", ".join(stage.label for stage in self._stages.values()))
        try:
            self._supervisor.start_all(self._init_timeout)
        except StageStartError:
            self._check_open()
            raise
        while not all(stage.is_up for stage in self._stages.values()):
            due = self._supervisor.due
            self._poll(deadline if due is None else min(deadline, due))
            self._supervisor.on_timer()
            self._check_start(deadline)
        self._supervisor.restarts = True

    def _check_open(self) -> None:
        if self._closing:
            raise PipelineClosedError("the pipeline was closed while it started")

    def _check_start(self, deadline: float) -> None:
        self._check_open()
        for stage in self._stages.values():
            if stage.death:
                where = f" on node {stage.node_name}" if stage.node_name else ""
                raise StageStartError(f"{stage.label} failed to start{where}: {stage.death}", stage.stage_id)
            if not stage.is_up and time.monotonic() >= deadline:
                raise StageStartError(
                    f"{stage.label} was not ready after {self._init_timeout:g} s; raise init_timeout",
                    stage.stage_id,
                )

    def _next_due(self) -> float:
        times = [self._supervisor.due, self._router.due, self._silence.due, self._control_calls.due]
        return min(due for due in times if due is not None)

    def _poll(self, due: float) -> None:
        """Sleeps until a message, a wake-up, a death or `due`; handles messages and deaths."""
        poller = zmq.Poller()
        served = [] if self._network is None else [self._network.server.socket]
        for readable in (*self._inbound.readables, *served):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake_up.fileno(), zmq.POLLIN)
        for fd in self._supervisor.filenos():
            poller.register(fd, zmq.POLLIN)
        wait_s = max(0.0, due - time.monotonic())
        ready = dict(poller.poll(math.ceil(wait_s * 1000)))
        self._silence.listened(wait_s)
        if self._wake_up.fileno() in ready:
            self._wake_up.clear()
        # Messages that a stage sent before it died are valid, so they come first.
        self._take_messages()
        if self._network is not None:
            self._network.server.serve()
        self._supervisor.handle_deaths({fd for fd in ready if isinstance(fd, int)})

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _end_requests(self) -> None:
        with self._lock:
            self._closing = True
        try:
            self._run_commands()
        finally:
            self._control_calls.close(self._why_ended)
            self._router.end_all(self._why_ended)
            self._end_drained()
            for stage in self._stages.values():
                stage.flush()

    def _end_drained(self) -> None:
        for drained in self._drained:
            drained.set_result(None)
        self._drained.clear()

    # Messages.

    def _take_messages(self) -> None:
        while True:
            try:
                received = self._inbound.receive()
            except MessageError as error:
                self._on_fault(error.sender, str(error))
                continue
            if received is None:
                return
            try:
                self._on_message(*received)
            except Exception as error:
                self._on_unhandled(received[0], error)

    def _is_current(self, sender: int, epoch: int) -> bool:
        """False for what was sent by a process that has died since."""
        stage = self._stages.get(sender)
        return stage is None or epoch == stage.epoch

    def _on_message(self, message: OrchestratorInbound, frames: list[memoryview]) -> None:
        stage = self._stages[message.instance_id]
        self._silence.heard(stage, message.more_s if isinstance(message, AliveMessage) else 0.0)
        match message:
            case ReadyMessage():
                self._on_ready(stage, message)
            case OutputMessage():
                self._router.on_output(stage, message, frames)
            case TextsMessage():
                self._router.on_texts(stage, message, frames)
            case ResultMessage():
                self._router.on_result(stage, message, frames)
            case ErrorMessage():
                self._router.on_error(stage, message)
            case RefundMessage():
                stage.credit.refund(message.num_requests, message.num_bytes)
            case StatsMessage():
                self._on_stats(stage, message.stats)
            case MetricsMessage():
                self._observer.engine_metrics(stage.stage_id, stage.instance.replica, message.families)
            case FaultMessage():
                self._on_fault(message.peer, message.error)
            case ControlResult():
                self._control_calls.on_result(stage, message)
            case AliveMessage():
                pass

    def _on_fault(self, peer: int | None, error: str) -> None:
        """Kills a stage whose messages cannot be read: its requests would never end."""
        stage = None if peer is None else self._stages.get(peer)
        if stage is None:
            logger.error("a message from an unknown sender cannot be read: %s", error)
        else:
            self._supervisor.kill(stage, f"a message from it could not be read: {error}")

    def _on_unhandled(self, message: OrchestratorInbound, error: Exception) -> None:
        """A message could not be handled: its request fails; without one all of its sender, which is killed."""
        logger.error("a %s could not be handled", type(message).__name__, exc_info=error)
        request_id = message.request_id if isinstance(message, OutputMessage | ResultMessage | ErrorMessage) else None
        if (stage := self._stages.get(message.instance_id)) is not None:
            self._router.fail_unhandled(request_id, stage, error)
        if request_id is None:
            self._on_fault(message.instance_id, f"{type(error).__name__}: {error}")

    def _on_ready(self, stage: StageHandle, message: ReadyMessage) -> None:
        if stage.epoch > 0:
            logger.warning("%s: ready again", stage.label)
            remove_payloads(self._run_dir.path, stage.instance_id)
        else:
            logger.info("%s: ready after %.1f s", stage.label, time.monotonic() - self._start_time)
        stage.weight_version = message.weight_version
        self._supervisor.on_ready(stage, message.address, message.remote_address)
        self._control_calls.on_stage_up(stage)
        self._on_weights(stage)
        if stage.is_up:
            self._router.on_stage_up(stage)

    def _on_weights(self, stage: StageHandle) -> None:
        """A stage without the weights of the pipeline takes no requests until it has them."""
        if self._control_calls.has_weights(stage):
            was_outdated = stage.state is StageState.OUTDATED
            self._supervisor.set_state(stage, StageState.READY if was_outdated else stage.state)
            if was_outdated:
                self._router.on_stage_up(stage)
        elif stage.is_up:
            logger.error("%s: its weights are not those of the pipeline; it takes no requests", stage.label)
            self._supervisor.set_state(stage, StageState.OUTDATED)
            self._router.on_stage_outdated(stage)

    def _on_stage_down(self, stage: StageHandle) -> None:
        self._inbound.drop_sender(stage.instance_id)
        self._router.on_stage_down(stage)
        self._control_calls.on_stage_down(stage)
        remove_segments(self._run_dir.path, stage.instance_id)
        self._stats = {instance: stats for instance, stats in self._stats.items() if instance != stage.instance_id}

    def _on_stats(self, stage: StageHandle, stats: StageStats) -> None:
        self._observer.stage_stats(stats)  # First: whoever sees them finds them in the metrics.
        self._stats = {**self._stats, stage.instance_id: stats}


def _future() -> Future[Any]:
    """One that nobody cancels: a caller that goes away does not take back what it asked for."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _check_open_files(count: int) -> None:
    """Raises `OSError` where so many more files cannot be opened: libzmq would abort the process."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
