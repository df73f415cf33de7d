# SPDX-License-Identifier: Apache-2.0
"""The IO thread of a stage: receives messages and the engine's output, and passes both to the `RequestHandler`.

It knows no kind of engine and no model.
"""

import math
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_omni.distributed.inbound import Inbound
from vllm_omni.distributed.messages import (
    HEARTBEAT_S,
    ORCHESTRATOR,
    AbortMessage,
    AliveMessage,
    ControlMessage,
    ControlResult,
    DataMessage,
    FaultMessage,
    InputMessage,
    MessageError,
    MetricsMessage,
    PeerDownMessage,
    PeerUpMessage,
    ReadyMessage,
    RefundMessage,
    ShutdownMessage,
    StageInbound,
    SubmitMessage,
    recv_at_stage,
)
from vllm_omni.distributed.network import Network
from vllm_omni.distributed.peers import make_socket
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.stage.engines.base import Error, Outbox, Result, StageEngine, Started, Stream
from vllm_omni.stage.output_sender import OutputSender
from vllm_omni.stage.request_handler import RequestHandler
from vllm_omni.stage.sources import Sources
from vllm_omni.stage.spec import StageSpec
from vllm_omni.stage.watchdog import IO, StepTimer

logger = get_logger(__name__)


class StageShell:
    """Connects a stage's engine to the rest of the pipeline. Runs on the IO thread and sleeps in one poll."""

    def __init__(
        self,
        spec: StageSpec,
        lifeline: socket.socket,
        on_lost_parent: Callable[[], None],
        outbox: Outbox,
        recorder: StageRecorder,
        tracer: StageTracer | None = None,
    ) -> None:
        """
        Args:
            lifeline: Readable when the parent is gone.
            on_lost_parent: Called then, to end the process: the engine's work has no consumer.
        """
        self._spec = spec
        self._instance_id = spec.instance.instance_id
        self._log = about(logger, stage=spec.instance.label)
        self._lifeline = lifeline
        self._on_lost_parent = on_lost_parent
        self._outbox = outbox
        self._recorder = recorder
        self._engine: StageEngine
        self._is_running = True
        self._is_ready = False
        self._context = zmq.Context()
        self._network = None if spec.network is None else Network(self._context, spec.network)
        local = make_socket(self._context, zmq.PULL)
        self._address = stage_address(Path(spec.run_dir), self._instance_id, spec.epoch)
        local.bind(self._address)
        self._sender = OutputSender(spec, self._context, self._network)
        self._sources = Sources(spec, self._context, self._sender.send, self._network)
        self._requests = RequestHandler(spec, self._sender, self._sources, recorder, tracer, outbox.put)
        sockets, fetcher = [local], None
        if self._network is not None:
            sockets, fetcher = [local, self._network.inbound], self._network.fetcher
        self._inbound = Inbound(sockets, recv_at_stage, self._requests.is_current, fetcher)

    def attach(
        self, engine: StageEngine, processor: StageInputProcessor | None, timer: StepTimer | None = None
    ) -> None:
        """Sets the engine, the stage input processor and the time limit of this thread's work. Called before the outbox
        reports `Started`."""
        self._engine = engine
        if timer is not None:
            self._requests.timer = timer
        self._requests.attach(engine, processor)

    def run(self) -> None:
        poller = zmq.Poller()
        served = [] if self._network is None else [self._network.server.socket]
        for readable in (*self._inbound.readables, *served, self._outbox.fileno(), self._lifeline.fileno()):
            poller.register(readable, zmq.POLLIN)
        while self._is_running:
            ready = dict(poller.poll(self._timeout()))
            if self._lifeline.fileno() in ready:
                self._on_lost_parent()
                break
            with self._requests.timer.of(IO):
                self._work(has_output=self._outbox.fileno() in ready)
        if self._network is not None:
            self._network.close()
        self._context.destroy(linger=0)  # Unsent messages have no consumer any more.

    def _work(self, has_output: bool) -> None:
        self._take_messages()
        if self._network is not None:
            self._network.server.serve()
        if has_output:
            self._take_outbox()
        self._requests.start_waiting()
        self._sources.send_refunds()
        self._on_timer()
        self._sender.flush()
        self._requests.wake_engine()

    def _timeout(self) -> int | None:
        """Milliseconds until something is due; None while nothing is."""
        dues = (self._requests.due, self._recorder.due, self._recorder.metrics_due, self._heartbeat_due)
        times = [due for due in dues if due is not None]
        return max(0, math.ceil((min(times) - time.monotonic()) * 1000)) if times else None

    @property
    def _heartbeat_due(self) -> float | None:
        return self._sender.last_sent + HEARTBEAT_S if self._is_ready else None

    def _take_messages(self) -> None:
        while self._is_running:
            try:
                received = self._inbound.receive()
            except MessageError as error:
                self._on_fault(error)
                continue
            if received is None:
                return
            self._on_message(*received)

    def _on_message(self, message: StageInbound, frames: list[memoryview]) -> None:
        self._recorder.changed()
        match message:
            case SubmitMessage():
                self._requests.on_submit(message, frames)
            case InputMessage():
                self._requests.on_input(message, frames)
            case DataMessage():
                self._requests.on_data(message, frames)
            case AbortMessage():
                for request_id in message.request_ids:
                    self._requests.abort(request_id)
            case RefundMessage():
                self._sender.targets[message.instance_id].credit.refund(message.num_requests, message.num_bytes)
            case PeerDownMessage():
                self._requests.on_peer_down(message)
                self._inbound.drop_sender(message.instance_id)
            case PeerUpMessage():
                self._requests.on_peer_up(message)
            case ControlMessage():
                self._requests.call_in_engine(partial(self._control, message))
            case ShutdownMessage():
                self._engine.stop()
                self._is_running = False

    def _control(self, message: ControlMessage) -> None:
        """Does a verb; on the engine's thread."""
        answer = partial(ControlResult, instance_id=self._instance_id, number=message.number)
        try:
            result = answer(value=_as_sent(self._engine.control(message.verb)))
        except Exception as error:
            is_invalid = isinstance(error, ValueError | NotImplementedError)
            if not is_invalid:
                self._log.error("%s failed", type(message.verb).__name__, exc_info=error)
            text = (str(error) or type(error).__name__).encode(errors="backslashreplace").decode()
            result = answer(error=text, invalid=is_invalid)
        result.weight_version = self._engine.weight_version
        self._outbox.put(partial(self._sender.send, result))

    def _take_outbox(self) -> None:
        self._recorder.changed()
        for item in self._outbox.take_all():
            match item:
                case Stream():
                    self._requests.on_stream(item)
                case Result():
                    self._requests.on_result(item)
                case Error():
                    self._requests.on_error(item, abort_engine=False)
                case Started():
                    self._on_started()
                case _:
                    item()

    def _on_started(self) -> None:
        self._requests.capacity = self._spec.max_inflight or self._engine.capacity
        self._requests.send_stats()
        remote_address = "" if self._network is None else self._network.address
        self._sender.send(
            ReadyMessage(
                instance_id=self._instance_id,
                epoch=self._spec.epoch,
                address=self._address,
                remote_address=remote_address,
                weight_version=self._engine.weight_version,
            )
        )
        self._is_ready = True

    def _on_timer(self) -> None:
        now = time.monotonic()
        self._requests.on_timer(now)
        if self._recorder.due is not None and self._recorder.due <= now:
            self._requests.send_stats()
        if self._recorder.metrics_due is not None and self._recorder.metrics_due <= now:
            self._send_metrics()
        if self._heartbeat_due is not None and self._heartbeat_due <= now:
            self._sender.send(AliveMessage(instance_id=self._instance_id))

    def _send_metrics(self) -> None:
        if families := self._engine.metrics():
            self._sender.send(MetricsMessage(instance_id=self._instance_id, families=families))
        self._recorder.metrics_sent()

    def _on_fault(self, error: MessageError) -> None:
        self._log.error("a message from stage %s cannot be decoded: %s", error.sender, error)
        if error.sender is not None and error.sender != ORCHESTRATOR:
            self._sender.send(FaultMessage(instance_id=self._instance_id, peer=error.sender, error=str(error)))


def _as_sent(value: Any) -> Any:
    """What a verb returned, as a message carries it; what is not plain data is made text.

    Raises:
        Exception: It cannot be sent.
    """
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=str))
