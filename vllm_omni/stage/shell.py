# SPDX-License-Identifier: Apache-2.0
"""The IO thread of a stage: receives messages and the engine's output, and passes both to the `RequestHandler`.

It knows no kind of engine and no model.
"""

import math
import os
import socket
import time
from pathlib import Path

import zmq

from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    AbortMessage,
    DataMessage,
    FaultMessage,
    MessageError,
    PeerDownMessage,
    PeerUpMessage,
    ReadyMessage,
    RefundMessage,
    ShutdownMessage,
    StageInbound,
    SubmitMessage,
    recv_at_stage,
)
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.stage.engines.base import Error, Outbox, Result, StageEngine, Started, Stream
from vllm_omni.stage.feeders import Feeders
from vllm_omni.stage.outlet import Outlet
from vllm_omni.stage.peers import make_socket
from vllm_omni.stage.request_handler import RequestHandler
from vllm_omni.stage.spec import StageSpec

logger = get_logger(__name__)


class StageShell:
    """Connects a stage's engine to the rest of the pipeline. Runs on the IO thread and sleeps in one poll."""

    def __init__(
        self,
        spec: StageSpec,
        lifeline: socket.socket,
        outbox: Outbox,
        recorder: StageRecorder,
        tracer: StageTracer | None = None,
    ) -> None:
        self._spec = spec
        self._stage_id = spec.stage.stage_id
        self._log = about(logger, stage=spec.stage.label)
        self._lifeline = lifeline
        self._outbox = outbox
        self._recorder = recorder
        self._engine: StageEngine
        self._is_running = True
        self._context = zmq.Context()
        self._inbound = make_socket(self._context, zmq.PULL)
        self._address = stage_address(Path(spec.run_dir), self._stage_id, spec.epoch)
        self._inbound.bind(self._address)
        self._outlet = Outlet(spec, self._context)
        self._feeders = Feeders(spec, self._context, self._outlet.send)
        self._requests = RequestHandler(spec, self._outlet, self._feeders, recorder, tracer)

    def attach(self, engine: StageEngine, processor: StageInputProcessor | None) -> None:
        """Sets the engine and the stage input processor. Called before the outbox reports `Started`."""
        self._engine = engine
        self._requests.attach(engine, processor)

    def run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._inbound, self._outbox.fileno(), self._lifeline.fileno()):
            poller.register(readable, zmq.POLLIN)
        while self._is_running:
            ready = dict(poller.poll(self._timeout()))
            if self._lifeline.fileno() in ready:
                os._exit(1)  # The parent is gone: the engine's work has no consumer.
            self._take_messages()
            if self._outbox.fileno() in ready:
                self._take_outbox()
            self._requests.start_waiting()
            self._feeders.send_refunds()
            self._act_on_time()
        self._context.destroy(linger=0)  # Unsent messages have no consumer any more.

    def _timeout(self) -> int | None:
        """Milliseconds until something is due; None while nothing is."""
        times = [due for due in (self._requests.due, self._recorder.due) if due is not None]
        return max(0, math.ceil((min(times) - time.monotonic()) * 1000)) if times else None

    def _take_messages(self) -> None:
        while self._is_running:
            try:
                received = recv_at_stage(self._inbound)
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
            case DataMessage():
                self._requests.on_data(message, frames)
            case AbortMessage():
                for request_id in message.request_ids:
                    self._requests.abort(request_id)
            case RefundMessage():
                self._outlet.targets[message.stage_id].credit.refund(message.num_requests, message.num_bytes)
            case PeerDownMessage():
                self._requests.on_peer_down(message)
            case PeerUpMessage():
                self._requests.on_peer_up(message)
            case ShutdownMessage():
                self._engine.stop()
                self._is_running = False

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

    def _on_started(self) -> None:
        self._requests.capacity = self._spec.max_inflight or self._engine.capacity
        self._requests.send_stats()
        self._outlet.send(ReadyMessage(stage_id=self._stage_id, epoch=self._spec.epoch, address=self._address))

    def _act_on_time(self) -> None:
        now = time.monotonic()
        self._requests.act_on_time(now)
        if self._recorder.due is not None and self._recorder.due <= now:
            self._requests.send_stats()

    def _on_fault(self, error: MessageError) -> None:
        self._log.error("a message from stage %s cannot be decoded: %s", error.sender, error)
        if error.sender is not None and error.sender != ORCHESTRATOR:
            self._outlet.send(FaultMessage(stage_id=self._stage_id, peer=error.sender, error=str(error)))
