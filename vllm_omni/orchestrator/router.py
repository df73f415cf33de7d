# SPDX-License-Identifier: Apache-2.0
"""Routes the requests of a pipeline: submits them to stages, collects outputs, and ends them.

Belongs to the orchestrator's thread. Does not depend on sockets or processes.
"""

import contextlib
import heapq
from collections.abc import Callable, Iterator, Mapping

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.distributed.messages import (
    ErrorMessage,
    OutputMessage,
    PayloadRef,
    PeerDownMessage,
    ResultMessage,
    TextsMessage,
)
from vllm_omni.distributed.payloads import PayloadReceiver
from vllm_omni.errors import (
    InvalidRequestError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    StageDeadError,
    StageExecutionError,
)
from vllm_omni.inputs import StageInput
from vllm_omni.metrics.observer import PipelineObserver
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.omni_stage import OmniStage, StageState
from vllm_omni.orchestrator.replica_set import ReplicaSet
from vllm_omni.orchestrator.request import PipelineRequest, RequestRecord
from vllm_omni.outputs import StageOutput


class RequestRouter:
    """Owns each admitted request until its terminal event."""

    def __init__(
        self,
        config: PipelineConfig,
        stages: Mapping[int, OmniStage],
        admission: Admission,
        payloads: PayloadReceiver,
        observer: PipelineObserver,
    ) -> None:
        """
        Args:
            stages: By instance id.
        """
        self._config = config
        self._stages = stages
        self._replicas = {
            stage_id: ReplicaSet([stages[i.instance_id] for i in instances], config.stages[stage_id].runtime.routing)
            for stage_id, instances in config.replicas.items()
        }
        self._admission = admission
        self._payloads = payloads
        self._observer = observer
        self._number = 0
        self._records: dict[str, RequestRecord] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; includes ended requests

    @property
    def due(self) -> float | None:
        """When `end_overdue` must be called (`time.monotonic()`)."""
        return self._deadlines[0][0] if self._deadlines else None

    def activity(self) -> dict[str, int]:
        """The number of requests that each stage works on, by stage name, in stage order. For any thread."""
        records = list(self._records.values())
        return {
            stage.name: sum(record.is_working(stage.stage_id) for record in records)
            for stage in self._config.stage_args
        }

    # Starting requests.

    def watch_deadline(self, request: PipelineRequest) -> None:
        """The request has arrived and waits for admission."""
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))

    def admit(self) -> None:
        """Starts waiting requests in order, as long as there is room."""
        while len(self._records) < self._config.runtime.max_inflight:
            request = self._admission.peek()
            if request is None or not self._takes_new(request):
                return
            self._start(self._admission.take())

    def _takes_new(self, request: PipelineRequest) -> bool:
        """Whether its first stages accept more requests."""
        firsts = (stage_id for stage_id in request.stages if not self._config.stages[stage_id].engine_input_source)
        return all(self._replicas[stage_id].take_new_requests for stage_id in firsts)

    def _start(self, request: PipelineRequest) -> None:
        self._number += 1
        record = RequestRecord(request, self._number, self._config)
        self._records[request.request_id] = record
        modalities = next(iter(request.stages.values())).modalities
        headers = self._observer.request_started(request.request_id, modalities, request.trace_headers)
        for stage_id, stage_request in request.stages.items():
            stage_request.trace_headers = headers
            stage = self._replicas[stage_id].select(stage_request)
            stage.num_requests += 1
            record.instances[stage_id] = stage.instance_id
        # The last stages first, so that a stage usually gets a request before its data.
        for stage_id in sorted(request.stages, reverse=True):
            if request.request_id in self._records:
                self._submit_to(self._stage_of(record, stage_id), record)

    def _stage_of(self, record: RequestRecord, stage_id: int) -> OmniStage:
        """The replica that works on the request."""
        return self._stages[record.instances[stage_id]]

    def _submit_to(self, stage: OmniStage, record: RequestRecord) -> None:
        """Submits a request to the stage, now or when it has restarted."""
        request = record.request
        if stage.state is StageState.DEAD:
            self._fail_dead(record, stage)
        elif stage.is_ready:
            record.unsubmitted.discard(stage.stage_id)
            try:
                stage.submit(
                    request.stages[stage.stage_id],
                    record.number,
                    sources=[record.instances[source] for source in record.sources(stage.stage_id)],
                    targets=[record.instances[target] for target in record.targets(stage.stage_id)],
                    is_final=stage.stage_id in request.final_stages,
                    streams=request.streams,
                )
                self._send_input(record)
            except Exception as error:
                self._fail_to_send(record, stage, error)

    def extend(self, request: PipelineRequest, stage_id: int, stage_input: StageInput, is_last: bool) -> None:
        """More input of a request, for a stage that reads the prompt. Dropped if the request has ended."""
        request.more_input.append((stage_id, stage_input, is_last))
        record = self._records.get(request.request_id)
        if record is not None:
            self._send_input(record)

    def _send_input(self, record: RequestRecord) -> None:
        """Sends the input that has arrived, unless the request waits for the stage."""
        request = record.request
        while request.more_input and request.more_input[0][0] not in record.unsubmitted:
            stage_id, stage_input, is_last = request.more_input.popleft()
            stage = self._stage_of(record, stage_id)
            try:
                stage.extend(request.request_id, stage_input, is_last)
            except Exception as error:
                self._fail_to_send(record, stage, error)
                return

    def _fail_to_send(self, record: RequestRecord, stage: OmniStage, error: Exception) -> None:
        text = f"the request's data could not be sent: {type(error).__name__}: {error}"
        self._fail(record, StageExecutionError(text, record.request.external_id, stage.stage_id))

    # Messages from stages.

    def on_output(self, stage: OmniStage, message: OutputMessage, frames: list[memoryview]) -> None:
        self._take_piece(stage, message.request_id, message.payload, frames, is_last=False)

    def on_texts(self, stage: OmniStage, message: TextsMessage, frames: list[memoryview]) -> None:
        """Raises `msgspec.MsgspecError` where the texts cannot be read."""
        for piece in self._payloads.get(list[StageOutput], message.payload, frames):
            record = self._records.get(piece.request_id)
            if record is not None:  # Else it has ended.
                with self._failing(record, stage):
                    record.add_piece(stage.stage_id, piece)

    def on_result(self, stage: OmniStage, message: ResultMessage, frames: list[memoryview]) -> None:
        if message.payload is not None:
            self._take_piece(stage, message.request_id, message.payload, frames, is_last=True)
        record = self._records.get(message.request_id)
        if record is None:
            return
        if stage.stage_id in record.pending:
            stage.num_requests -= 1
        record.finish(stage.stage_id, message.metrics)
        for target, epoch in message.sent_to.items():
            if self._stages[target].stage_id in record.pending and epoch != self._stages[target].epoch:
                self._fail_dead(record, self._stages[target])  # It was sent to a process that has died.
                return
        if not record.pending:
            del self._records[message.request_id]
            self._observer.request_ended(record.summarize())
            record.complete()

    def on_error(self, stage: OmniStage, message: ErrorMessage) -> None:
        record = self._records.get(message.request_id)
        if record is None:
            return
        if message.dead_instance is not None:
            self._fail_dead(record, self._stages[message.dead_instance])
            return
        kind = InvalidRequestError if message.invalid else StageExecutionError
        error = kind(f"{stage.label}: {message.error}", record.request.external_id, stage.stage_id)
        error.stage_traceback = message.traceback
        self._fail(record, error)

    def _take_piece(
        self, stage: OmniStage, request_id: str, payload: PayloadRef, frames: list[memoryview], is_last: bool
    ) -> None:
        record = self._records.get(request_id)
        if record is None:  # It has ended.
            self._payloads.discard(payload)
            return
        with self._failing(record, stage):
            piece = self._payloads.get(StageOutput, payload, frames)
            piece.is_last = is_last
            record.add_piece(stage.stage_id, piece)

    @contextlib.contextmanager
    def _failing(self, record: RequestRecord, stage: OmniStage) -> Iterator[None]:
        """Fails the request whose output cannot be read."""
        try:
            yield
        except Exception as error:
            text = f"the output of {stage.label} could not be read: {type(error).__name__}: {error}"
            self._fail(record, StageExecutionError(text, record.request.external_id, stage.stage_id))

    # Stages that die and restart.

    def on_stage_down(self, stage: OmniStage) -> None:
        """Fails the requests whose data the stage's process held; the others wait for the next process."""
        finished = []
        for record in list(self._records.values()):
            if record.instances.get(stage.stage_id) != stage.instance_id:
                continue
            if self._is_lost(record, stage):
                self._fail_dead(record, stage)
            elif stage.stage_id in record.pending:
                record.unsubmitted.add(stage.stage_id)
            else:
                finished.append(record.request.request_id)
        for neighbour in self._neighbours(stage):
            neighbour.send(PeerDownMessage(instance_id=stage.instance_id, epoch=stage.epoch - 1, finished=finished))

    def on_stage_up(self, stage: OmniStage) -> None:
        """A new process of the stage takes requests. It gets those that waited for it, in order, then their data."""
        for neighbour in self._neighbours(stage):
            if neighbour.is_ready:
                stage.send(neighbour.peer_up(stage.node))
        for record in sorted(self._records.values(), key=lambda record: record.number):
            if stage.stage_id in record.unsubmitted and record.instances[stage.stage_id] == stage.instance_id:
                self._submit_to(stage, record)
        for neighbour in self._neighbours(stage):
            neighbour.send(stage.peer_up(neighbour.node))

    def _is_lost(self, record: RequestRecord, stage: OmniStage) -> bool:
        """Whether the stage's process held data of the request that cannot be recovered."""
        if stage.stage_id in record.pending:
            return stage.state is StageState.DEAD or self._has_input(stage, record)
        # It kept its output for a target that was restarting.
        return any(target in record.unsubmitted for target in record.targets(stage.stage_id))

    def _has_input(self, stage: OmniStage, record: RequestRecord) -> bool:
        """Whether some input of the request was sent to the stage, as far as the orchestrator can tell.

        A source that sends windows has the exact state, and reports it.
        """
        if stage.stage_id in record.unsubmitted:
            return False
        sources = record.sources(stage.stage_id)
        return not sources or any(source not in record.pending for source in sources)

    def _neighbours(self, stage: OmniStage) -> list[OmniStage]:
        """The replicas of the stages that it sends data to, or gets data from."""
        stage_ids = {*stage.config.engine_input_source, *self._config.targets[stage.stage_id]}
        return [replica for stage_id in sorted(stage_ids) for replica in self._replicas[stage_id].stages]

    # Ending requests.

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, lambda external_id: RequestAbortedError("the request was aborted", external_id))

    def end_overdue(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        text = "the request was not complete at its deadline (request_timeout_s)"
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self._end(request_id, lambda external_id: RequestTimeoutError(text, external_id))

    def end_all(self) -> None:
        """The pipeline is closed; nothing is admitted any more."""
        text = "the pipeline was closed"
        for request in self._admission.close():
            self._end_waiting(request, RequestAbortedError(text, request.external_id))
        for record in list(self._records.values()):
            self._fail(record, RequestAbortedError(text, record.request.external_id))

    def _end(self, request_id: str, make_error: Callable[[str], RequestError]) -> None:
        """Ends a request, running or waiting. Does nothing if it has ended."""
        waiting = self._admission.withdraw(request_id)
        if waiting is not None:
            self._end_waiting(waiting, make_error(waiting.external_id))
        elif request_id in self._records:
            record = self._records[request_id]
            self._fail(record, make_error(record.request.external_id))

    def _end_waiting(self, request: PipelineRequest, error: RequestError) -> None:
        """Ends a request that was not submitted to any stage."""
        self._observer.request_started(request.request_id, [], request.trace_headers)
        self._report_failure(RequestRecord(request, 0, self._config), error)

    def _fail_dead(self, record: RequestRecord, stage: OmniStage) -> None:
        text = f"{stage.label} died: {stage.death}"
        self._fail(record, StageDeadError(text, record.request.external_id, stage.stage_id))

    def _fail(self, record: RequestRecord, error: RequestError) -> None:
        """Ends a request with an error and aborts it at every stage."""
        del self._records[record.request.request_id]
        for stage_id in record.request.stages:
            stage = self._stage_of(record, stage_id)
            stage.num_requests -= stage_id in record.pending
            stage.abort([record.request.request_id])
        self._report_failure(record, error)

    def _report_failure(self, record: RequestRecord, error: RequestError) -> None:
        stage = None if error.stage_id is None else self._config.stages[error.stage_id].name
        self._observer.request_ended(record.summarize(type(error).__name__, stage))
        record.fail(error)
