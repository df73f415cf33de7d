# SPDX-License-Identifier: Apache-2.0
"""The shell of a stage: a thread that does everything of a stage but its engine's work.

It receives requests and the outputs of other stages, cuts them into windows, runs the stage input processor, and sends
results on. It knows no kind of engine and no model.
"""

import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    AbortMessage,
    DataMessage,
    ErrorMessage,
    FaultMessage,
    Message,
    MessageError,
    PeerDownMessage,
    PeerUpMessage,
    ReadyMessage,
    RefundMessage,
    ShutdownMessage,
    StageInbound,
    StatsMessage,
    StatsQuery,
    SubmitMessage,
    recv_at_stage,
)
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.bookkeeper import Bookkeeper
from vllm_omni.stage.engines.base import Error, NewRequest, Outbox, Result, StageEngine, Started, Stream, StreamChunk
from vllm_omni.stage.feeders import Feeders, cost_of
from vllm_omni.stage.outlet import Outlet
from vllm_omni.stage.peers import make_socket
from vllm_omni.stage.queues import FlushTimes, WaitingQueue
from vllm_omni.stage.request_state import InputCall, InputStreams, RequestState
from vllm_omni.stage.spec import StageSpec

logger = get_logger(__name__)

_LOST_AFTER_S = 0.5
"""How long the last output of a stage that died may still be on its way through the kernel."""


class StageShell:
    """Joins a stage's engine to the rest of the pipeline. Runs on a thread of its own: the IO thread."""

    def __init__(
        self,
        spec: StageSpec,
        lifeline: socket.socket,
        outbox: Outbox,
        recorder: StageRecorder,
        tracer: StageTracer,
    ) -> None:
        self._spec = spec
        self._stage_id = spec.stage.stage_id
        self._log = about(logger, stage=f"stage {self._stage_id} ({spec.stage.name})")
        self._lifeline = lifeline
        self._outbox = outbox
        self._books = Bookkeeper(recorder, tracer)
        self._recorder = recorder
        self._engine: StageEngine
        self._processor: StageInputProcessor | None
        self._capacity = 0
        self._is_running = True
        self._requests: dict[str, RequestState] = {}
        self._num_running = 0
        self._last_number = 0
        self._early: dict[str, list[tuple[DataMessage, list[memoryview]]]] = defaultdict(list)
        self._lost: list[tuple[float, int, list[str]]] = []  # (when, source that died, requests it had finished)
        self._flush_times = FlushTimes(self._requests)
        self._connect()
        self._waiting = WaitingQueue(self._outlet.has_room)

    def _connect(self) -> None:
        spec, run_dir = self._spec, Path(self._spec.run_dir)
        self._context = zmq.Context()
        self._inbound = make_socket(self._context, zmq.PULL)
        self._inbound.bind(stage_address(run_dir, self._stage_id, spec.epoch))
        self._channel = PayloadChannel(ThresholdConnector(run_dir, "", spec.shm_threshold_bytes))
        self._outlet = Outlet(spec, self._context)
        self._feeders = Feeders(spec, self._context, self._tell)

    def attach(self, engine: StageEngine, processor: StageInputProcessor | None) -> None:
        """Gives the shell what it works with. Called before the stage is announced as ready."""
        self._engine = engine
        self._processor = processor

    def run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._inbound, self._outbox.fileno(), self._lifeline.fileno()):
            poller.register(readable, zmq.POLLIN)
        while self._is_running:
            ready = dict(poller.poll(self._timeout()))
            if self._lifeline.fileno() in ready:
                os._exit(1)  # The parent is gone: whatever the engine is doing, nobody wants it.
            self._take_messages()
            if self._outbox.fileno() in ready:
                self._take_outbox()
            self._begin_waiting()
            self._feeders.send_refunds()
            self._act_on_time()
        self._context.destroy(linger=0)  # Nobody reads any more what is still to be sent.

    def _timeout(self) -> int | None:
        """Milliseconds until something is due; None while nothing is."""
        due = (self._flush_times.due, self._lost[0][0] if self._lost else None, self._books.due)
        times = [when for when in due if when is not None]
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
        if not isinstance(message, StatsQuery):
            self._books.note_work()
        match message:
            case SubmitMessage():
                self._on_submit(message, frames)
            case DataMessage():
                self._on_data(message, frames)
            case AbortMessage():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case RefundMessage():
                self._outlet.targets[message.stage_id].credit.refund(message.num_requests, message.num_bytes)
            case PeerDownMessage():
                self._on_peer_down(message)
            case PeerUpMessage():
                self._on_peer_up(message)
            case StatsQuery():
                self._send_stats()
            case ShutdownMessage():
                self._shut_down()

    def _take_outbox(self) -> None:
        for item in self._outbox.take_all():
            self._books.note_work()
            match item:
                case Stream():
                    self._on_stream(item)
                case Result():
                    self._on_result(item)
                case Error():
                    self._on_error(item, tell_engine=False)
                case Started():
                    self._capacity = self._spec.max_inflight or self._engine.capacity
                    self._tell(ReadyMessage(stage_id=self._stage_id, epoch=self._spec.epoch))

    def _act_on_time(self) -> None:
        now = time.monotonic()
        for state in self._flush_times.take_due(now):
            self._send_segment(state, state.outputs.flush_if_due)
        while self._lost and self._lost[0][0] <= now:
            self._fail_lost(*self._lost.pop(0)[1:])
        if self._books.due is not None and self._books.due <= now:
            self._send_stats()

    def _on_fault(self, error: MessageError) -> None:
        self._log.error("a message from stage %s cannot be understood: %s", error.sender, error)
        if error.sender is not None and error.sender != ORCHESTRATOR:
            self._tell(FaultMessage(stage_id=self._stage_id, peer=error.sender, error=str(error)))

    def _shut_down(self) -> None:
        if not self._capacity:
            os._exit(0)  # An engine that is still loading cannot be interrupted otherwise.
        self._engine.stop()
        self._is_running = False

    # Inputs.

    def _on_submit(self, message: SubmitMessage, frames: list[memoryview]) -> None:
        self._last_number = message.number
        self._drop_stale()
        try:
            request = self._channel.get(StageRequest, message.payload, frames)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            if not message.sources:
                self._feeders.refund(cost_of(message))
            self._fail(Error.from_exception(message.request_id, error))
            return
        state = self._make_state(message, request)
        self._requests[message.request_id] = state
        for early in self._early.pop(message.request_id, ()):
            self._on_data(*early)
        if not message.sources:
            state.owed.append(cost_of(message))
            self._enqueue(state)

    def _drop_stale(self) -> None:
        """Drops data that ran ahead of requests which will not come: they ended while this process was starting."""
        for request_id, entries in list(self._early.items()):
            if entries[0][0].number < self._last_number:
                for message, _ in self._early.pop(request_id):
                    self._discard(message)

    def _make_state(self, message: SubmitMessage, request: StageRequest) -> RequestState:
        windows = {i: self._spec.sources[i].window.for_request(message.streams) for i in message.sources}
        return RequestState(
            submit=message,
            request=request,
            inputs=InputStreams(windows),
            outputs=self._outlet.output_stream(message),
            metrics=StageMetrics(stage_id=self._stage_id, name=self._spec.stage.name),
        )

    def _on_data(self, message: DataMessage, frames: list[memoryview]) -> None:
        state = self._requests.get(message.request_id)
        if state is None and message.number > self._last_number:
            self._early[message.request_id].append((message, frames))
            return
        if state is None:
            self._discard(message)
            return
        self._recorder.received(message.source, message.payload.num_bytes, time.monotonic() - message.sent)
        try:
            self._take_piece(state, message, frames)
        except Exception as error:
            self._on_error(Error.from_exception(message.request_id, error))
        owed = cost_of(message)
        if state.is_queued:
            state.owed.append(owed)
        else:
            self._feeders.refund(owed)

    def _take_piece(self, state: RequestState, message: DataMessage, frames: list[memoryview]) -> None:
        """More of the request's input has arrived.

        Raises:
            OSError, ValueError, msgspec.MsgspecError: It cannot be read.
            RuntimeError: A piece before it did not arrive.
        """
        piece = self._channel.get(StageOutput, message.payload, frames)
        if message.sequence != state.num_received.get(message.source, 0):
            raise RuntimeError(f"a piece of the output of stage {message.source} was lost")
        state.num_received[message.source] = message.sequence + 1
        piece.is_last = message.is_last
        for _ in range(state.inputs.add(message.source, piece)):
            self._recorder.window(message.source)
        if state.is_running:
            self._feed(state)
        elif not state.is_queued and state.inputs.is_ready:
            self._enqueue(state)

    def _discard(self, message: DataMessage) -> None:
        self._channel.discard(message.payload)
        self._feeders.refund(cost_of(message))

    def _enqueue(self, state: RequestState) -> None:
        state.metrics.arrival = time.monotonic()
        self._recorder.enqueued()
        state.is_queued = True
        self._waiting.add(state)

    def _begin_waiting(self) -> None:
        """Hands over requests as long as the engine, and the stages that read their outputs, have room for more."""
        while self._num_running < self._capacity and (state := self._waiting.first()) is not None:
            self._begin(state)
        self._books.note_blocking(self._num_running < self._capacity and len(self._waiting) > 0)

    def _leave_queue(self, state: RequestState) -> None:
        state.is_queued = False
        self._waiting.remove(state)
        for owed in state.owed:
            self._feeders.refund(owed)
        state.owed.clear()

    def _begin(self, state: RequestState) -> None:
        self._leave_queue(state)
        self._outlet.reserve(state)
        self._recorder.dequeued()
        state.metrics.started = time.monotonic()
        state.is_running = True
        self._num_running += 1
        self._feed(state)

    def _feed(self, state: RequestState) -> None:
        """Gives the engine all that it can be given of the request's input."""
        while state.is_running and state.inputs.is_ready:
            call = state.inputs.next_call()
            try:
                stage_input = None if self._processor is None else self._processor.process(state.request, call.sources)
                self._hand_over(state, call, stage_input)
            except Exception as error:
                self._on_error(Error.from_exception(state.request_id, error, isinstance(error, InvalidRequestError)))

    def _hand_over(self, state: RequestState, call: InputCall, stage_input: StageInput | None) -> None:
        has_nothing_to_do = self._processor is not None and stage_input is None
        if state.is_in_engine:
            if call.is_last or not has_nothing_to_do:
                sources = {} if has_nothing_to_do else call.sources
                self._engine.inbox.put(StreamChunk(state.request_id, stage_input, sources, call.is_last))
        elif not has_nothing_to_do:
            state.is_in_engine = True
            streams, reads_rows = self._outlet.streams(state), self._outlet.reads_tensors(state)
            self._engine.inbox.put(
                NewRequest(state.request, stage_input, call.sources, call.is_last, streams, reads_rows)
            )
        elif call.is_last:
            assert self._processor is not None
            self._on_result(Result(state.request_id, self._empty_output(state, self._processor)))

    def _empty_output(self, state: RequestState, processor: StageInputProcessor) -> StageOutput:
        return StageOutput(
            request_id=state.request_id,
            stage_id=self._stage_id,
            completions=[Completion(finish_reason="stop")],
            tensors=processor.empty_output(),
            is_last=True,
        )

    # Outputs.

    def _on_stream(self, item: Stream) -> None:
        state = self._requests.get(item.request_id)
        if state is None:
            return  # Aborted meanwhile.
        self._note_output(state, item.output)
        self._send_segment(state, lambda: state.outputs.add(item.output))
        self._flush_times.note(state)

    def _note_output(self, state: RequestState, output: StageOutput) -> None:
        if output.step is not None:
            return  # It says how far the stage has come; it is no output.
        output.prompt = state.request.prompt if not state.metrics.num_chunks else None
        state.metrics.num_chunks += 1
        if state.metrics.first_output is None:
            state.metrics.first_output = time.monotonic()

    def _send_segment(self, state: RequestState, make: Callable[[], StageOutput | None]) -> None:
        """Sends a piece of the request's output, if there is one to send now. If it cannot, the request fails."""
        try:
            segment = make()
            if segment is not None:
                self._outlet.send_segment(state, segment)
        except Exception as error:
            self._on_error(Error.from_exception(state.request_id, error))

    def _on_result(self, result: Result) -> None:
        state = self._requests.get(result.request_id)
        if state is None:
            return  # Aborted meanwhile.
        self._note_output(state, result.output)
        metrics = state.metrics
        if metrics.num_chunks == 1:
            metrics.first_output = None
        metrics.finished = time.monotonic()
        metrics.num_input_tokens, metrics.num_output_tokens = result.num_input_tokens, result.num_output_tokens
        try:
            self._outlet.send_result(state, result.output)
        except Exception as error:
            self._on_error(Error.from_exception(result.request_id, error), tell_engine=False)
        else:
            self._forget(result.request_id, tell_engine=False)
            self._books.completed(state)

    # Ends other than a result.

    def _on_error(self, error: Error, tell_engine: bool = True) -> None:
        state = self._forget(error.request_id, tell_engine)
        if state is not None:
            self._outlet.forget(error.request_id)
            self._fail(error, state)

    def _fail(self, error: Error, state: RequestState | None = None) -> None:
        self._books.failed(state, cause=error.error.partition(":")[0])
        message = ErrorMessage(
            request_id=error.request_id,
            stage_id=self._stage_id,
            error=error.error,
            traceback=error.traceback,
            invalid=error.invalid,
        )
        self._tell(message)

    def _abort(self, request_id: str) -> None:
        for message, _ in self._early.pop(request_id, ()):
            self._discard(message)
        state = self._forget(request_id)
        self._outlet.forget(request_id)
        if state is not None:
            self._books.aborted(state)

    def _forget(self, request_id: str, tell_engine: bool = True) -> RequestState | None:
        """Drops the state of a request; the engine, too, stops working on it."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        if state.is_queued:
            self._leave_queue(state)
        if state.is_running:
            state.is_running = False
            self._num_running -= 1
        if state.is_in_engine and tell_engine:
            self._engine.abort(request_id)
        return state

    # Neighbours.

    def _on_peer_down(self, message: PeerDownMessage) -> None:
        peer = message.stage_id
        if peer in self._outlet.targets:
            self._outlet.targets[peer].disconnect()
            for state in list(self._requests.values()):
                if peer in state.num_sent:
                    self._report_dead(state.request_id, peer)
        if peer in self._feeders:
            self._feeders.disconnect(peer)
            self._lost.append((time.monotonic() + _LOST_AFTER_S, peer, message.finished))

    def _fail_lost(self, source: int, request_ids: list[str]) -> None:
        """Fails the requests that the dead source had finished, but whose output has not arrived."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None and not state.inputs.has_ended(source):
                self._report_dead(request_id, source)

    def _report_dead(self, request_id: str, dead_stage: int) -> None:
        self._forget(request_id)
        self._outlet.forget(request_id)
        text = "it died with data of the request"
        message = ErrorMessage(request_id=request_id, stage_id=self._stage_id, error=text, dead_stage=dead_stage)
        self._tell(message)

    def _on_peer_up(self, message: PeerUpMessage) -> None:
        if message.stage_id in self._feeders:
            self._feeders.connect(message.stage_id, message.epoch)
        if message.stage_id in self._outlet.targets:
            for request_id, error in self._outlet.on_target_up(message).items():
                self._fail(Error.from_exception(request_id, error))

    def _tell(self, message: Message) -> None:
        """Sends to the orchestrator."""
        self._outlet.tell(message)

    def _send_stats(self) -> None:
        self._books.due = None
        stats = self._recorder.snapshot(len(self._waiting), self._num_running, self._engine.kv_blocks())
        self._tell(StatsMessage(stats=stats))
