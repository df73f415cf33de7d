# SPDX-License-Identifier: Apache-2.0
"""The shell of a stage: a thread that does everything of a stage but its engine's work.

It receives requests and the outputs of other stages, runs the stage input processor, and sends results on. It knows no
kind of engine and no model.
"""

import os
import socket
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.orchestrator.messages import (
    AbortMessage,
    DataMessage,
    ErrorMessage,
    ReadyMessage,
    ResultMessage,
    ShutdownMessage,
    SubmitMessage,
    recv_at_stage,
    send,
)
from vllm_omni.orchestrator.run_dir import orchestrator_address, stage_address
from vllm_omni.outputs import StageMetrics, StageOutput
from vllm_omni.stage.engines.base import Error, NewRequest, Outbox, Result, StageEngine, Started
from vllm_omni.stage.input_processor import StageInputProcessor
from vllm_omni.stage.spec import StageSpec

_LINGER_MS = 1000


@dataclass(slots=True)
class _RequestState:
    """A request that this stage works on, or waits for the inputs of."""

    submit: SubmitMessage
    request: StageRequest
    sources: dict[int, StageOutput] = field(default_factory=dict)
    arrival: float = 0.0


class StageShell:
    """The IO thread: everything of a stage but its engine."""

    def __init__(self, spec: StageSpec, lifeline: socket.socket, outbox: Outbox) -> None:
        self._stage = spec.stage
        self._lifeline = lifeline
        self._outbox = outbox
        self._engine: StageEngine
        self._processor: StageInputProcessor | None
        self._started = False
        self._running = True
        self._requests: dict[str, _RequestState] = {}
        self._last_number = 0
        self._early: dict[str, list[tuple[DataMessage, list[memoryview]]]] = defaultdict(list)
        self._connect(spec)

    def _connect(self, spec: StageSpec) -> None:
        run_dir = Path(spec.run_dir)
        prefix = f"payload-{os.getpid()}"
        self._context = zmq.Context()
        self._inbound = self._socket(zmq.PULL)
        self._inbound.bind(stage_address(run_dir, self._stage.stage_id))
        self._orchestrator = self._socket(zmq.PUSH)
        self._orchestrator.connect(orchestrator_address(run_dir))
        self._channel = PayloadChannel(ThresholdConnector(run_dir, prefix, spec.shm_threshold_bytes))
        self._targets: dict[int, tuple[zmq.Socket, PayloadChannel]] = {}
        for target, threshold in spec.targets.items():
            sock = self._socket(zmq.PUSH)
            sock.connect(stage_address(run_dir, target))
            connector = ThresholdConnector(run_dir, f"{prefix}-{target}", threshold)
            self._targets[target] = (sock, PayloadChannel(connector))

    def _socket(self, kind: int) -> zmq.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        return sock

    def attach(self, engine: StageEngine, processor: StageInputProcessor | None) -> None:
        """Gives the shell what it works with. Called before the stage is announced as ready."""
        self._engine = engine
        self._processor = processor

    def run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._inbound, self._outbox.fileno(), self._lifeline.fileno()):
            poller.register(readable, zmq.POLLIN)
        while self._running:
            ready = dict(poller.poll())
            if self._lifeline.fileno() in ready:
                os._exit(1)  # The parent is gone: whatever the engine is doing, nobody wants it.
            self._take_messages()
            self._take_outbox()
        self._context.destroy()

    def _take_messages(self) -> None:
        while (received := recv_at_stage(self._inbound)) is not None:
            message, frames = received
            match message:
                case SubmitMessage():
                    self._on_submit(message, frames)
                case DataMessage():
                    self._on_data(message, frames)
                case AbortMessage():
                    for request_id in message.request_ids:
                        self._forget(request_id)
                case ShutdownMessage():
                    self._shut_down()
                    return

    def _take_outbox(self) -> None:
        for item in self._outbox.take_all():
            match item:
                case Result():
                    self._on_result(item)
                case Error():
                    self._on_error(item)
                case Started():
                    self._started = True
                    send(self._orchestrator, ReadyMessage(stage_id=self._stage.stage_id))

    def _shut_down(self) -> None:
        if not self._started:
            os._exit(0)  # An engine that is still loading cannot be interrupted otherwise.
        self._engine.stop()
        self._running = False

    # Inputs.

    def _on_submit(self, message: SubmitMessage, frames: list[memoryview]) -> None:
        self._last_number = message.number
        request_id = message.request_id
        try:
            request = self._channel.get(StageRequest, message.payload, frames)
        except (OSError, msgspec.MsgspecError) as error:
            self._on_error(Error.from_exception(request_id, error))
            return
        self._requests[request_id] = _RequestState(message, request)
        for early in self._early.pop(request_id, ()):
            self._on_data(*early)
        if not message.sources:
            self._begin(self._requests[request_id])

    def _on_data(self, message: DataMessage, frames: list[memoryview]) -> None:
        state = self._requests.get(message.request_id)
        if state is None and message.number > self._last_number:
            self._early[message.request_id].append((message, frames))
            return
        if state is None:
            self._channel.discard(message.payload)
            return
        try:
            state.sources[message.source] = self._channel.get(StageOutput, message.payload, frames)
        except (OSError, msgspec.MsgspecError) as error:
            self._on_error(Error.from_exception(message.request_id, error))
            return
        if len(state.sources) == len(state.submit.sources):
            self._begin(state)

    def _begin(self, state: _RequestState) -> None:
        """All inputs are here: hands the request to the engine."""
        state.arrival = time.monotonic()
        stage_input: StageInput | None = None
        if self._processor is not None:
            try:
                stage_input = self._processor.process(state.request, state.sources)
            except Exception as error:
                invalid = isinstance(error, InvalidRequestError)
                self._on_error(Error.from_exception(state.request.request_id, error, invalid))
                return
            if stage_input is None:
                self._on_result(self._empty_result(state.request, self._processor))
                return
        self._engine.inbox.put(NewRequest(state.request, stage_input, state.sources))

    def _empty_result(self, request: StageRequest, processor: StageInputProcessor) -> Result:
        output = StageOutput(
            request_id=request.request_id,
            stage_id=self._stage.stage_id,
            tensors=processor.empty_output(),
        )
        return Result(request.request_id, output)

    # Outputs.

    def _on_result(self, result: Result) -> None:
        state = self._requests.pop(result.request_id, None)
        if state is None:
            return  # Aborted meanwhile.
        try:
            self._send_result(state, result)
        except OSError as error:
            self._fail(Error.from_exception(result.request_id, error))

    def _send_result(self, state: _RequestState, result: Result) -> None:
        submit = state.submit
        result.output.prompt = state.request.prompt
        for target in submit.targets:
            sock, channel = self._targets[target]
            ref, frames = channel.put(result.output)
            message = DataMessage(
                request_id=submit.request_id, number=submit.number, source=self._stage.stage_id, payload=ref
            )
            send(sock, message, frames)
        payload, frames = self._channel.put(self._for_caller(result.output)) if submit.is_final else (None, ())
        metrics = StageMetrics(
            stage_id=self._stage.stage_id,
            name=self._stage.name,
            arrival=state.arrival,
            finished=time.monotonic(),
            num_input_tokens=result.num_input_tokens,
            num_output_tokens=result.num_output_tokens,
        )
        done = ResultMessage(
            request_id=submit.request_id, stage_id=self._stage.stage_id, metrics=metrics, payload=payload
        )
        send(self._orchestrator, done, frames)

    def _for_caller(self, output: StageOutput) -> StageOutput:
        """What a caller gets of an output: a text, without the tensors that only other stages read."""
        if self._stage.final_output_type != "text":
            return output
        return msgspec.structs.replace(output, tensors={})

    def _on_error(self, error: Error) -> None:
        self._requests.pop(error.request_id, None)
        self._fail(error)

    def _fail(self, error: Error) -> None:
        message = ErrorMessage(
            request_id=error.request_id,
            stage_id=self._stage.stage_id,
            error=error.error,
            traceback=error.traceback,
            invalid=error.invalid,
        )
        send(self._orchestrator, message)

    def _forget(self, request_id: str) -> None:
        for message, _ in self._early.pop(request_id, ()):
            self._channel.discard(message.payload)
        if self._requests.pop(request_id, None) is not None:
            self._engine.abort(request_id)
