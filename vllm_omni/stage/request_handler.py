# SPDX-License-Identifier: Apache-2.0
"""The requests of a stage: their inputs arrive, the engine runs them, their outputs are sent.

Cuts the outputs of other stages into windows and calls the stage input processor. Runs on the IO thread.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.connectors import PayloadReceiver
from vllm_omni.distributed.messages import (
    AliveMessage,
    DataMessage,
    ErrorMessage,
    InputMessage,
    PeerDownMessage,
    PeerUpMessage,
    StatsMessage,
    SubmitMessage,
)
from vllm_omni.errors import InvalidRequestError, StageDeadError
from vllm_omni.inputs import ReplyParsers, StageInput, StageRequest
from vllm_omni.metrics.memory import device_bytes, resident_bytes
from vllm_omni.metrics.recorder import ABORTED, StageRecorder
from vllm_omni.metrics.stats import COMPLETED, StageMetrics
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.payloads import AdditionalInformationPayload
from vllm_omni.stage.engines.base import (
    AbortRequest,
    Error,
    InboxItem,
    NewRequest,
    Result,
    StageEngine,
    Stream,
    StreamChunk,
)
from vllm_omni.stage.output_sender import OutputSender
from vllm_omni.stage.queues import FlushTimes, WaitingQueue
from vllm_omni.stage.request_state import InputStreams, Phase, RequestState
from vllm_omni.stage.sources import Sources, cost_of
from vllm_omni.stage.spec import StageSpec
from vllm_omni.stage.spoken_reply import SpokenReply, load_parsers
from vllm_omni.stage.watchdog import INPUT, StepTimer

_LOST_AFTER_S = 0.5
"""How long the last output of a dead stage may still be in transit in the kernel."""


class RequestHandler:
    """
    Attributes:
        capacity: Requests that the engine holds at once; 0 until it has started.
        num_running: Requests in the engine.
        timer: The time limit of this thread's work.
    """

    def __init__(
        self,
        spec: StageSpec,
        sender: OutputSender,
        sources: Sources,
        recorder: StageRecorder,
        tracer: StageTracer | None,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """
        Args:
            tracer: None: no spans.
            call: Calls a function on the IO thread, soon; for any thread.
        """
        self.capacity = 0
        self.num_running = 0
        self.timer = StepTimer()
        self._spec = spec
        self._instance_id = spec.instance.instance_id
        self._payloads = PayloadReceiver(Path(spec.run_dir))
        self._sender = sender
        self._sources = sources
        self._recorder = recorder
        self._tracer = tracer
        self._call = call
        self._has_parsers: dict[ReplyParsers, bool] = {}  # False: they are being loaded
        self._engine: StageEngine
        self._processor: StageInputProcessor | None
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(sender.has_room)
        self._for_engine: list[InboxItem] = []
        self._flush_times = FlushTimes(self._requests)
        self._last_number = 0
        self._out_of_order: dict[str, list[tuple[DataMessage, list[memoryview]]]] = defaultdict(list)
        self._lost: list[tuple[float, PeerDownMessage]] = []  # when, and the source that died
        self._dead: dict[int, int] = {}  # by instance the last epoch that has died and of which no more is expected

    def attach(self, engine: StageEngine, processor: StageInputProcessor | None) -> None:
        self._engine = engine
        self._processor = processor

    def send_stats(self) -> None:
        """Sends a snapshot to the orchestrator."""
        engine = self._engine
        kv_blocks, caches, unbatched = engine.kv_blocks(), engine.cache_counts(), engine.unbatched()
        memory = resident_bytes(engine.processes), device_bytes()
        stats = self._recorder.snapshot(len(self._waiting), self.num_running, kv_blocks, caches, unbatched, memory)
        self._sender.send(StatsMessage(instance_id=self._instance_id, stats=stats))
        if stats.num_running or stats.kv_blocks_used:
            self._recorder.changed()  # by the engine, which sends no message for it

    @property
    def due(self) -> float | None:
        """When `on_timer` has something to do."""
        times = [self._flush_times.due, self._lost[0][0] if self._lost else None]
        return min((due for due in times if due is not None), default=None)

    def on_timer(self, now: float) -> None:
        for state in self._flush_times.take_due(now):
            self._send_segment(state, state.outputs.flush_if_due)
        while self._lost and self._lost[0][0] <= now:
            self._fail_lost(self._lost.pop(0)[1])

    # Inputs.

    def on_submit(self, message: SubmitMessage, frames: list[memoryview]) -> None:
        self._last_number = message.number
        self._drop_stale()
        try:
            request = self._payloads.get(StageRequest, message.payload, frames)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            if not message.sources:
                self._sources.refund(cost_of(message))
            self._fail(Error.from_exception(message.request_id, error))
            return
        if request.spoken_text is not None and message.sources:
            self._load_parsers(request.spoken_text.parsers)  # They may be there before its data.
        state = self._make_state(message, request)
        self._requests[message.request_id] = state
        for early in self._out_of_order.pop(message.request_id, ()):
            self.on_data(*early)
        if not message.sources:
            state.pending_refunds.append(cost_of(message))
            self._enqueue(state)

    def _drop_stale(self) -> None:
        """Drops early data of requests that will not be submitted: they ended while this process was starting."""
        for request_id, entries in list(self._out_of_order.items()):
            if entries[0][0].number < self._last_number and request_id not in self._requests:
                for message, _ in self._out_of_order.pop(request_id):
                    self._discard(message)

    def _make_state(self, message: SubmitMessage, request: StageRequest) -> RequestState:
        instance, stage = self._spec.instance, self._spec.stage
        sources = [self._spec.sources[i] for i in message.sources]
        windows = {source.stage_id: source.window.for_request(message.streams) for source in sources}
        inputs = InputStreams(windows)
        if request.input_override is not None:
            inputs = self._override_input(request.input_override, message.streams)
        return RequestState(
            submit=message,
            request=request,
            inputs=inputs,
            outputs=self._sender.segmenter(message),
            metrics=StageMetrics(
                stage_id=stage.stage_id,
                name=instance.name,
                replica=instance.replica,
                weight_version=self._engine.weight_version,
            ),
        )

    def _override_input(self, given: StageOutput, streams: bool) -> InputStreams:
        """What a caller gives in place of the output of the stage's source, in the same windows."""
        windows = {source.stage_id: source.window.for_request(streams) for source in self._spec.sources.values()}
        inputs = InputStreams(windows or {given.stage_id: WindowConfig()})
        inputs.add(next(iter(windows), given.stage_id), given)
        return inputs

    def on_input(self, message: InputMessage, frames: list[memoryview]) -> None:
        """More of the prompt. It is small and costs no credit."""
        state = self._requests.get(message.request_id)
        if state is None:
            self._payloads.discard(message.payload)  # The request has ended.
            return
        try:
            information = self._payloads.get(AdditionalInformationPayload, message.payload, frames)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.on_error(Error.from_exception(message.request_id, error))
            return
        more = StageInput(additional_information=information.to_dict(), num_ready_tokens=message.num_ready_tokens)
        state.more_input.append(StreamChunk(message.request_id, more, is_last=message.is_last))
        if state.phase is Phase.IN_ENGINE:
            self._pass_more_input(state)

    def _pass_more_input(self, state: RequestState) -> None:
        self._for_engine += state.more_input
        state.more_input.clear()

    def on_data(self, message: DataMessage, frames: list[memoryview]) -> None:
        state = self._requests.get(message.request_id)
        if state is None and message.number > self._last_number:
            self._out_of_order[message.request_id].append((message, frames))
            return
        if state is None:
            self._discard(message)
            return
        if state.request.spoken_text is not None and not self._load_parsers(state.request.spoken_text.parsers):
            self._out_of_order[message.request_id].append((message, frames))
            return
        self._recorder.received(self._source_stage(message), message.payload.num_bytes, time.monotonic() - message.sent)
        try:
            self._take_piece(state, message, frames)
        except Exception as error:
            self.on_error(Error.from_exception(message.request_id, error))
        cost = cost_of(message)
        if state.phase is Phase.QUEUED:
            state.pending_refunds.append(cost)
        else:
            self._sources.refund(cost)

    def _take_piece(self, state: RequestState, message: DataMessage, frames: list[memoryview]) -> None:
        """More of the request's input has arrived.

        Raises:
            OSError, ValueError, msgspec.MsgspecError: It cannot be read.
            RuntimeError: A piece before it did not arrive.
        """
        piece = self._payloads.get(StageOutput, message.payload, frames)
        if message.sequence != state.num_received.get(message.source, 0):
            raise RuntimeError(f"a piece of the output of stage {self._source_stage(message)} was lost")
        state.num_received[message.source] = message.sequence + 1
        piece.is_last = message.is_last
        if state.request.spoken_text is not None:
            state.reply = state.reply or SpokenReply(state.request)
            piece = state.reply.select(piece)
        source = self._source_stage(message)
        for _ in range(state.inputs.add(source, piece)):
            self._recorder.window(source)
        if state.has_place:
            self._feed(state)
        elif state.phase is Phase.NEEDS_INPUT and state.inputs.is_ready:
            self._enqueue(state)

    def _load_parsers(self, parsers: ReplyParsers) -> bool:
        """Whether they are loaded. If not, a thread loads them, and what needs them waits: other requests do not."""
        if parsers not in self._has_parsers:
            self._has_parsers[parsers] = False

            def load() -> None:
                error: BaseException | None = None
                try:
                    load_parsers(parsers)
                except BaseException as raised:
                    error = raised
                self._call(lambda: self._on_parsers(parsers, error))

            threading.Thread(target=load, name="parsers", daemon=True).start()
        return self._has_parsers[parsers]

    def _on_parsers(self, parsers: ReplyParsers, error: BaseException | None) -> None:
        """They are loaded, or cannot be; then the next request that needs them tries again."""
        if error is None:
            self._has_parsers[parsers] = True
        else:
            del self._has_parsers[parsers]
        for state in list(self._requests.values()):
            spoken_text = state.request.spoken_text
            if spoken_text is None or spoken_text.parsers != parsers:
                continue
            early = self._out_of_order.pop(state.request_id, [])
            if error is not None:
                self.on_error(Error.from_exception(state.request_id, error))
            for piece in early:
                self.on_data(*piece)

    def _source_stage(self, message: DataMessage) -> int:
        return self._spec.sources[message.source].stage_id

    def _discard(self, message: DataMessage) -> None:
        self._payloads.discard(message.payload)
        self._sources.refund(cost_of(message))

    def _enqueue(self, state: RequestState) -> None:
        state.metrics.arrival = time.monotonic()
        self._recorder.enqueued()
        state.enter(Phase.QUEUED)
        self._waiting.add(state)

    def start_waiting(self) -> None:
        """Starts waiting requests while the engine, and the stages that read their outputs, have room."""
        while self.num_running < self.capacity and (state := self._waiting.first()) is not None:
            self._start(state)
        self._recorder.set_blocked(self.num_running < self.capacity and len(self._waiting) > 0)

    def call_in_engine(self, call: Callable[[], None]) -> None:
        """Calls a function on the engine's thread, after what was passed to the engine before."""
        self._for_engine.append(call)

    def wake_engine(self) -> None:
        """Passes all new items to the engine: its thread needs the interpreter's lock from now on."""
        for item in self._for_engine:
            self._engine.inbox.put(item)
        self._for_engine.clear()

    def _leave_queue(self, state: RequestState) -> None:
        self._waiting.remove(state)
        for cost in state.pending_refunds:
            self._sources.refund(cost)
        state.pending_refunds.clear()

    def _start(self, state: RequestState) -> None:
        self._leave_queue(state)
        self._sender.reserve(state)
        self._recorder.dequeued()
        state.metrics.started = time.monotonic()
        state.enter(Phase.STARTED)
        self.num_running += 1
        self._feed(state)

    def _feed(self, state: RequestState) -> None:
        """Passes all available input of the request to the engine."""
        while state.has_place and state.inputs.is_ready:
            sources, is_last = state.inputs.next_call()
            try:
                stage_input = None if self._processor is None else self._process(self._processor, state, sources)
                self._pass_to_engine(state, sources, is_last, stage_input)
            except Exception as error:
                self.on_error(Error.from_exception(state.request_id, error, isinstance(error, InvalidRequestError)))

    def _process(
        self, processor: StageInputProcessor, state: RequestState, sources: dict[int, StageOutput]
    ) -> StageInput | None:
        if more_s := self.timer.more_s(INPUT):  # No heartbeat is sent meanwhile.
            self._sender.send(AliveMessage(instance_id=self._instance_id, more_s=more_s))
        with self.timer.of(INPUT):
            return processor.process(state.request, sources)

    def _pass_to_engine(
        self, state: RequestState, sources: dict[int, StageOutput], is_last: bool, stage_input: StageInput | None
    ) -> None:
        has_nothing_to_do = self._processor is not None and stage_input is None
        if state.phase is Phase.IN_ENGINE:
            if is_last or not has_nothing_to_do:
                sources = {} if has_nothing_to_do else sources
                self._for_engine.append(StreamChunk(state.request_id, stage_input, sources, is_last))
        elif not has_nothing_to_do:
            state.enter(Phase.IN_ENGINE)
            streams, reads_rows = self._sender.streams(state), self._sender.reads_tensors(state)
            is_last = is_last and state.request.is_complete
            self._for_engine.append(NewRequest(state.request, stage_input, sources, is_last, streams, reads_rows))
            self._pass_more_input(state)
        elif is_last:
            assert self._processor is not None
            self.on_result(Result(state.request_id, self._empty_output(state, self._processor)))

    def _empty_output(self, state: RequestState, processor: StageInputProcessor) -> StageOutput:
        return StageOutput(
            request_id=state.request_id,
            stage_id=self._spec.stage.stage_id,
            completions=[Completion(finish_reason="stop")],
            tensors=processor.empty_output(),
            is_last=True,
        )

    # Outputs.

    def on_stream(self, item: Stream) -> None:
        state = self._requests.get(item.request_id)
        if state is None:
            return  # Aborted meanwhile.
        self._record_output(state, item.output)
        self._send_segment(state, lambda: state.outputs.add(item.output))
        self._flush_times.add(state)

    def _record_output(self, state: RequestState, output: StageOutput) -> None:
        if output.step is not None:
            return  # A progress report, not output.
        output.prompt = state.request.prompt if not state.metrics.num_chunks else None
        state.metrics.num_chunks += 1
        if state.metrics.first_output is None:
            state.metrics.first_output = time.monotonic()

    def _send_segment(self, state: RequestState, make: Callable[[], StageOutput | None]) -> None:
        """Sends a segment of the request's output, if one is due. If that fails, the request fails."""
        try:
            segment = make()
            if segment is not None:
                self._sender.send_segment(state, segment)
        except Exception as error:
            self.on_error(Error.from_exception(state.request_id, error))

    def on_result(self, result: Result) -> None:
        state = self._requests.get(result.request_id)
        if state is None:
            return  # Aborted meanwhile.
        self._record_output(state, result.output)
        metrics = state.metrics
        if metrics.num_chunks == 1:
            metrics.first_output = None
        metrics.finished = time.monotonic()
        metrics.num_input_tokens, metrics.num_output_tokens = result.num_input_tokens, result.num_output_tokens
        metrics.num_cached_tokens = result.num_cached_tokens
        try:
            message, frames = self._sender.finish(state, result.output)
        except Exception as error:
            self.on_error(Error.from_exception(result.request_id, error), abort_engine=False)
        else:
            self._forget(result.request_id, abort_engine=False)
            self._record_end(state, COMPLETED)
            self._sender.send(message, frames)

    # Ends other than a result.

    def on_error(self, error: Error, abort_engine: bool = True) -> None:
        state = self._forget(error.request_id, abort_engine)
        if state is not None:
            self._sender.forget(error.request_id)
            self._fail(error, state)

    def _fail(self, error: Error, state: RequestState | None = None) -> None:
        self._record_end(state, error.kind)
        message = ErrorMessage(
            request_id=error.request_id,
            instance_id=self._instance_id,
            error=error.error,
            traceback=error.traceback,
            invalid=error.invalid,
        )
        self._sender.send(message)

    def abort(self, request_id: str) -> None:
        for message, _ in self._out_of_order.pop(request_id, ()):
            self._discard(message)
        state = self._forget(request_id)
        self._sender.forget(request_id)
        if state is not None:
            self._record_end(state, ABORTED)

    def _record_end(self, state: RequestState | None, outcome: str) -> None:
        """
        Args:
            state: None for a request whose message could not be decoded, or that the stage has forgotten.
        """
        self._recorder.ended(outcome)
        if state is not None:
            if outcome != COMPLETED:
                state.metrics.finished = time.monotonic()
            if self._tracer is not None:
                headers = state.request.trace_headers
                self._tracer.request_ended(state.request_id, headers, state.metrics, outcome)
        if not self._requests:
            self.send_stats()  # Before the end of the last request is reported.

    def _forget(self, request_id: str, abort_engine: bool = True) -> RequestState | None:
        """Drops the state of a request and aborts it in the engine."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        if state.phase is Phase.QUEUED:
            self._leave_queue(state)
        elif state.has_place:
            self.num_running -= 1
        if state.enter(Phase.ENDED) is Phase.IN_ENGINE and abort_engine:
            self._for_engine.append(AbortRequest(request_id))
        return state

    # Peers.

    def on_peer_down(self, message: PeerDownMessage) -> None:
        peer = message.instance_id
        if peer in self._sender.targets:
            self._sender.targets[peer].disconnect()
            for state in list(self._requests.values()):
                if peer in state.num_sent:
                    self._report_lost(state.request_id, peer)
        if peer in self._sources:
            self._sources.disconnect(peer)
            self._lost.append((time.monotonic() + _LOST_AFTER_S, message))

    def is_current(self, sender: int, epoch: int) -> bool:
        """Whether messages of a process are received: no longer after its death, and some time for its last ones."""
        return epoch > self._dead.get(sender, -1)

    def _fail_lost(self, message: PeerDownMessage) -> None:
        """Fails the requests that the dead source had finished, but whose output has not arrived."""
        source = message.instance_id
        self._dead[source] = message.epoch
        for request_id in message.finished:
            state = self._requests.get(request_id)
            if state is not None and not state.inputs.has_ended(self._spec.sources[source].stage_id):
                self._report_lost(request_id, source)

    def _report_lost(self, request_id: str, dead_instance: int) -> None:
        state = self._forget(request_id)
        self._sender.forget(request_id)
        self._record_end(state, StageDeadError.__name__)
        text = "it died with data of the request"
        message = ErrorMessage(
            request_id=request_id, instance_id=self._instance_id, error=text, dead_instance=dead_instance
        )
        self._sender.send(message)

    def on_peer_up(self, message: PeerUpMessage) -> None:
        if message.instance_id in self._sources:
            self._sources.connect(message)
        if message.instance_id in self._sender.targets:
            for request_id, error in self._sender.on_target_up(message).items():
                self._fail(Error.from_exception(request_id, error))
