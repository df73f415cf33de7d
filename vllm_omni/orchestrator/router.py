# SPDX-License-Identifier: Apache-2.0
"""Routes the requests of a pipeline: submits them to stages, collects outputs, and ends them.

Belongs to the orchestrator's thread. Does not depend on sockets or processes.
"""

import contextlib
import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.distributed.connectors import PayloadReceiver
from vllm_omni.distributed.messages import (
    ErrorMessage,
    OutputMessage,
    PayloadRef,
    PeerDownMessage,
    ResultMessage,
    TextsMessage,
)
from vllm_omni.errors import (
    InvalidRequestError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    StageCrashError,
    StageDeadError,
    StageExecutionError,
)
from vllm_omni.inputs import StageInput
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.observer import PipelineObserver
from vllm_omni.metrics.stats import StageState
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.isolated_retry import LIMIT_S, IsolatedRetry
from vllm_omni.orchestrator.replica_set import ReplicaSet
from vllm_omni.orchestrator.request import PipelineRequest, RepetitionError, RequestRecord
from vllm_omni.outputs import StageOutput

logger = logging.getLogger("vllm.omni.orchestrator")


class RequestRouter:
    """Owns each admitted request until its terminal event.

    Attributes:
        is_paused: No waiting request is started.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stages: Mapping[int, StageHandle],
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
        self._retried: dict[str, str] = {}  # ids in stages, by id
        self._isolated_retries: list[IsolatedRetry] = []
        self._resumed: list[RequestRecord] = []  # streams that were lost
        self.is_paused = False
        self._deadlines: list[tuple[float, str]] = []  # a heap; includes ended requests

    @property
    def due(self) -> float | None:
        """When `end_overdue` or `admit` must be called (`time.monotonic()`)."""
        times = [isolated.ends for isolated in self._isolated_retries if isolated.ends < math.inf]
        return min([*times, *(deadline for deadline, _ in self._deadlines[:1])], default=None)

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
        """Starts waiting requests in order, as long as there is room; first those that are tried again."""
        resumed, self._resumed = self._resumed, []
        for record in resumed:
            if record.request_id in self._records:
                self._submit(record, {})
        for isolated in list(self._isolated_retries):
            self._continue(isolated)
        while not self.is_paused and len(self._records) < self._config.runtime.max_inflight:
            request = self._admission.peek(self._reaches_all) if self._isolated_retries else self._admission.peek()
            if request is None or not self._takes_new(request):
                return
            self._start(request)

    def _takes_new(self, request: PipelineRequest) -> bool:
        """Whether its first stages accept more requests, and none waits for an update of its weights."""
        if any(self._replicas[stage_id].is_outdated for stage_id in request.stages):
            return False
        sources = {stage_id: self._config.stages[stage_id].engine_input_source for stage_id in request.stages}
        firsts = (stage_id for stage_id in request.stages if request.stages.keys().isdisjoint(sources[stage_id]))
        excluded = self._excluded
        return all(self._replicas[stage_id].take_new_requests(excluded) for stage_id in firsts)

    def _reaches_all(self, request: PipelineRequest) -> bool:
        """Whether each of its stages has a replica that is not kept for isolated retries."""
        excluded = self._excluded
        return all(
            any(stage.instance_id not in excluded for stage in self._replicas[stage_id].stages)
            for stage_id in request.stages
        )

    @property
    def _excluded(self) -> set[int]:
        """Instances that take no new requests: their processes are kept for isolated retries."""
        return {isolated.instance_id for isolated in self._isolated_retries}

    def _start(self, request: PipelineRequest) -> None:
        """Starts a waiting request. It is always known here or in `Admission`, so that it gets its terminal event."""
        record = self._records[request.request_id] = RequestRecord(request, 0, self._config)
        self._admission.withdraw(request.request_id)
        modalities = next(iter(request.stages.values())).modalities
        headers = self._observer.request_started(request.request_id, modalities, request.trace_headers)
        for stage_request in request.stages.values():
            stage_request.trace_headers = headers
        self._submit(record, {})

    def _submit(self, record: RequestRecord, process: Mapping[int, int]) -> None:
        """Submits a request to its stages.

        Args:
            process: The instances that it has to run in, by stage id; any for other stages.
        """
        request = record.request
        self._number += 1
        record.number = self._number
        try:
            self._select_replicas(record, process)
        except Exception as error:
            logger.exception("request %s could not be started", request.external_id)
            text = f"the request could not be started: {type(error).__name__}: {error}"
            self._fail(record, StageExecutionError(text, request.external_id))
            return
        # The last stages first, so that a stage usually gets a request before its data.
        for stage_id in sorted(request.stages, reverse=True):
            if record.request_id in self._records:
                self._submit_to(self._stage_of(record, stage_id), record)

    def _select_replicas(self, record: RequestRecord, process: Mapping[int, int]) -> None:
        excluded = self._excluded
        for stage_id, stage_request in record.request.stages.items():
            if stage_id in process:
                stage = self._stages[process[stage_id]]
            else:
                stage = self._replicas[stage_id].select(stage_request, excluded)
            stage.num_requests += 1
            record.instances[stage_id] = stage.instance_id

    def _stage_of(self, record: RequestRecord, stage_id: int) -> StageHandle:
        """The replica that works on the request."""
        return self._stages[record.instances[stage_id]]

    def _submit_to(self, stage: StageHandle, record: RequestRecord) -> None:
        """Submits a request to the stage, now or when it has restarted."""
        request = record.request
        if stage.state is StageState.DEAD or (record.num_retries and stage.waits_for):
            self._fail_dead(record, stage)
        elif stage.is_up:
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
        record = self._find(request.request_id)
        if record is not None:
            self._send_input(record)

    def _send_input(self, record: RequestRecord) -> None:
        """Sends the input that has arrived, unless the request waits for the stage."""
        request = record.request
        while request.more_input and request.more_input[0][0] not in record.unsubmitted:
            stage_id, stage_input, is_last = more = request.more_input.popleft()
            record.sent_input.append(more)
            stage = self._stage_of(record, stage_id)
            try:
                stage.extend(record.request_id, stage_input, is_last)
            except Exception as error:
                self._fail_to_send(record, stage, error)
                return

    def on_send_error(self, stage: StageHandle, request_id: str, error: Exception) -> None:
        """Data of a request could not be sent, after the stage's handle had taken it."""
        if (record := self._records.get(request_id)) is not None:  # Else it has ended.
            self._fail_to_send(record, stage, error)

    def _fail_to_send(self, record: RequestRecord, stage: StageHandle, error: Exception) -> None:
        text = f"the request's data could not be sent: {type(error).__name__}: {error}"
        self._fail(record, StageExecutionError(text, record.request.external_id, stage.stage_id))

    # Messages from stages.

    def on_output(self, stage: StageHandle, message: OutputMessage, frames: list[memoryview]) -> None:
        self._take_piece(stage, message.request_id, message.payload, frames, is_last=False)

    def on_texts(self, stage: StageHandle, message: TextsMessage, frames: list[memoryview]) -> None:
        """
        Raises:
            Exception: The texts cannot be read.
        """
        for piece in self._payloads.get(list[StageOutput], message.payload, frames):
            record = self._records.get(piece.request_id)
            if record is not None:  # Else it has ended.
                with self._failing(record, stage):
                    record.add_piece(stage.stage_id, piece)

    def on_result(self, stage: StageHandle, message: ResultMessage, frames: list[memoryview]) -> None:
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
                self._on_request_lost(record, self._stages[target])  # It was sent to a process that has died.
                return
        if not record.pending:
            self._complete(record, stage)

    def _complete(self, record: RequestRecord, stage: StageHandle) -> None:
        with self._failing(record, stage):
            event, summary = record.complete(), record.summarize()
            self._drop(record)
            self._observer.request_ended(summary)
            record.end(event)

    def on_error(self, stage: StageHandle, message: ErrorMessage) -> None:
        record = self._records.get(message.request_id)
        if record is None:
            return
        if message.dead_instance is not None:
            self._on_request_lost(record, self._stages[message.dead_instance])
            return
        kind = InvalidRequestError if message.invalid else StageExecutionError
        error = kind(f"{stage.label}: {message.error}", record.request.external_id, stage.stage_id)
        error.stage_traceback = message.traceback
        self._fail(record, error)

    def _take_piece(
        self, stage: StageHandle, request_id: str, payload: PayloadRef, frames: list[memoryview], is_last: bool
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
    def _failing(self, record: RequestRecord, stage: StageHandle) -> Iterator[None]:
        """Fails the request whose output cannot be read, or cannot go on after a retry."""
        try:
            yield
        except RepetitionError:
            assert record.lost_in is not None
            logger.warning("request %s: its output was not the same when it was made again", record.request.external_id)
            self._fail_dead(record, record.lost_in)
        except Exception as error:
            text = f"the output of {stage.label} could not be read: {type(error).__name__}: {error}"
            self._fail(record, StageExecutionError(text, record.request.external_id, stage.stage_id))

    # Stages that die and restart.

    def on_stage_down(self, stage: StageHandle) -> None:
        """Starts the requests again whose data the stage's process held; the others wait for the next process."""
        finished = []
        for record in list(self._records.values()):
            if not record.is_assigned_to(stage):
                continue
            if self._is_lost(record, stage):
                self._on_request_lost(record, stage)
            elif stage.stage_id in record.pending:
                record.unsubmitted.add(stage.stage_id)
            else:
                finished.append(record.request_id)
        for neighbour in self._neighbours(stage):
            neighbour.send(PeerDownMessage(instance_id=stage.instance_id, epoch=stage.epoch - 1, finished=finished))

    def on_stage_waits(self, stage: StageHandle) -> None:
        """Nobody knows when there will be a node for its next process: what would be tried again in it fails."""
        isolated = self._isolated_retry(stage)
        for record in [self._records[request_id] for request_id in self._retried.values()]:
            is_unsubmitted = stage.stage_id in record.unsubmitted and record.is_assigned_to(stage)
            if is_unsubmitted or (isolated is not None and record in isolated.waiting):
                self._fail_dead(record, stage)

    def on_stage_outdated(self, stage: StageHandle) -> None:
        """Nobody knows when the weights of its process are updated: what it should work on fails."""
        for record in list(self._records.values()):
            if stage.stage_id in record.pending and record.is_assigned_to(stage):
                text = f"{stage.label} died, and its next process has not got the weights of the pipeline"
                self._fail(record, StageDeadError(text, record.request.external_id, stage.stage_id))

    def on_stage_up(self, stage: StageHandle) -> None:
        """A new process of the stage takes requests. It gets those that waited for it, in order, then their data."""
        for neighbour in self._neighbours(stage):
            if neighbour.is_up:
                stage.send(neighbour.peer_up(stage.node))
        for record in sorted(self._records.values(), key=lambda record: record.number):
            if stage.stage_id in record.unsubmitted and record.is_assigned_to(stage):
                self._submit_to(stage, record)
        for neighbour in self._neighbours(stage):
            neighbour.send(stage.peer_up(neighbour.node))

    def _is_lost(self, record: RequestRecord, stage: StageHandle) -> bool:
        """Whether the stage's process held data of the request that cannot be recovered."""
        if stage.stage_id in record.pending:
            return stage.state is StageState.DEAD or self._has_input(stage, record)
        # It kept its output for a target that was restarting.
        return any(target in record.unsubmitted for target in record.targets(stage.stage_id))

    def _has_input(self, stage: StageHandle, record: RequestRecord) -> bool:
        """Whether some input of the request was sent to the stage, as far as the orchestrator can tell.

        A source that sends windows has the exact state, and reports it.
        """
        if stage.stage_id in record.unsubmitted:
            return False
        sources = record.sources(stage.stage_id)
        return not sources or any(source not in record.pending for source in sources)

    def _on_request_lost(self, record: RequestRecord, stage: StageHandle) -> None:
        """The stage's process died with data of the request."""
        isolated = self._isolated_retry(stage)
        if isolated is not None and isolated.running is record and record.is_working(stage.stage_id):
            self._fail_crashed(record, stage)
        elif record.is_isolated or not record.can_repeat:
            self._fail_dead(record, stage)
        elif record.has_begun and not record.num_retries and not self._replicas[stage.stage_id].is_dead:
            self._resume(record, stage)
        elif stage.state is StageState.DEAD:
            self._fail_dead(record, stage)
        else:
            self._retry_isolated(record, stage)

    def _resume(self, record: RequestRecord, stage: StageHandle) -> None:
        """Starts a stream again at once, beside others, so that its listener may hear no gap: what has made some output
        is seldom what kills a process."""
        self._resumed.append(self._make_retry(record, stage))
        logger.warning("request %s: %s died; its stream is made again", record.request.external_id, stage.label)

    def _isolated_retry(self, stage: StageHandle) -> IsolatedRetry | None:
        return next((each for each in self._isolated_retries if each.instance_id == stage.instance_id), None)

    def _fail_crashed(self, record: RequestRecord, stage: StageHandle) -> None:
        """It was alone in the process: it is the cause."""
        text = f"{stage.label} died of the request twice, at last while it did nothing else: {stage.death}"
        self._fail(record, StageCrashError(text, record.request.external_id, stage.stage_id))

    def _retry_isolated(self, record: RequestRecord, stage: StageHandle) -> None:
        """Tries it once more, alone in the next process."""
        isolated = self._isolated_retry(stage)
        if isolated is None:
            isolated = IsolatedRetry(stage.instance_id, stage.stage_id)
            self._isolated_retries.append(isolated)
        retry = self._make_retry(record, stage)
        retry.is_isolated = True
        isolated.waiting.append(retry)
        logger.warning("request %s: %s died; it is tried again, alone", record.request.external_id, stage.label)

    def _make_retry(self, record: RequestRecord, stage: StageHandle) -> RequestRecord:
        self._leave(record)
        retry = record.make_retry(stage)
        self._records[retry.request_id] = retry
        self._retried[record.request.request_id] = retry.request_id
        return retry

    def _continue(self, isolated: IsolatedRetry) -> None:
        """Tries the next request, if nothing else is in the process; ends the retries if there is none."""
        if isolated.running is not None and not self._is_in(isolated, isolated.running):
            isolated.running = None
        waiting = isolated.waiting = deque(r for r in isolated.waiting if r.request_id in self._records)
        stage = self._stages[isolated.instance_id]
        now = time.monotonic()
        if not stage.is_up:
            isolated.ends = math.inf
            is_over = stage.state in (StageState.DEAD, StageState.OUTDATED)
        else:
            isolated.ends = min(isolated.ends, now + LIMIT_S)
            is_over = now >= isolated.ends
        if is_over or not (waiting or isolated.running):
            self._isolated_retries.remove(isolated)
            for record in waiting:
                self._fail_dead(record, stage)
        elif waiting and isolated.ends < math.inf and not any(map(isolated.concerns, self._records.values())):
            isolated.running = waiting.popleft()
            self._submit(isolated.running, {isolated.stage_id: isolated.instance_id})

    def _is_in(self, isolated: IsolatedRetry, record: RequestRecord) -> bool:
        return record.request_id in self._records and isolated.concerns(record)

    def _neighbours(self, stage: StageHandle) -> list[StageHandle]:
        """The replicas of the stages that it sends data to, or gets data from."""
        stage_ids = {*stage.config.engine_input_source, *self._config.targets[stage.stage_id]}
        return [replica for stage_id in sorted(stage_ids) for replica in self._replicas[stage_id].stages]

    # Ending requests.

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, lambda external_id: RequestAbortedError("the request was aborted", external_id))

    def abort_all(self) -> None:
        """Ends every request that is not waiting for admission."""
        self.abort([record.request.request_id for record in self._records.values()])

    def find_external(self, external_ids: Collection[str] | None) -> list[str]:
        """The ids of the requests, running or waiting, with these ids of their callers; None: of all."""
        requests = [record.request for record in self._records.values()] + self._admission.waiting()
        return [each.request_id for each in requests if external_ids is None or each.external_id in external_ids]

    @property
    def is_idle(self) -> bool:
        """Whether no stage works on a request."""
        return not self._records

    def end_overdue(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        text = "the request was not complete at its deadline (request_timeout_s)"
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self._end(request_id, lambda external_id: RequestTimeoutError(text, external_id))

    def fail_unhandled(self, request_id: str | None, stage: StageHandle, error: Exception) -> None:
        """A message of the stage could not be handled.

        Args:
            request_id: The request that it is about; None: it may be about any that the stage works on.
        """
        text = f"a message of {stage.label} could not be handled: {type(error).__name__}: {error}"
        for record in list(self._records.values()):
            is_there = stage.stage_id in record.pending and record.is_assigned_to(stage)
            if record.request_id == request_id or (request_id is None and is_there):
                self._fail(record, StageExecutionError(text, record.request.external_id, stage.stage_id))

    def end_all(self, reason: str = "the pipeline was closed") -> None:
        """Ends every request; nothing is admitted any more."""
        for request in self._admission.close(reason):
            with _continuing():
                self._end_waiting(request, RequestAbortedError(reason, request.external_id))
        for record in list(self._records.values()):
            with _continuing():
                self._fail(record, RequestAbortedError(reason, record.request.external_id))

    def _end(self, request_id: str, make_error: Callable[[str], RequestError]) -> None:
        """Ends a request, running or waiting. Does nothing if it has ended."""
        waiting = self._admission.withdraw(request_id)
        if waiting is not None:
            self._end_waiting(waiting, make_error(waiting.external_id))
        elif (record := self._find(request_id)) is not None:
            self._fail(record, make_error(record.request.external_id))

    def _find(self, request_id: str) -> RequestRecord | None:
        """A running request by the id that its caller knows."""
        return self._records.get(self._retried.get(request_id, request_id))

    def _end_waiting(self, request: PipelineRequest, error: RequestError) -> None:
        """Ends a request that was not submitted to any stage."""
        self._observer.request_started(request.request_id, [], request.trace_headers)
        self._report_failure(RequestRecord(request, 0, self._config), error)

    def _fail_dead(self, record: RequestRecord, stage: StageHandle) -> None:
        error = StageDeadError(f"{stage.label} died: {stage.death}", record.request.external_id, stage.stage_id)
        if stage.state is StageState.DEAD:
            restart = self._config.runtime.restart
            error.retry_after_s = restart.max_backoff_s if restart.max_restarts else None
        self._fail(record, error)

    def _fail(self, record: RequestRecord, error: RequestError) -> None:
        """Ends a request with an error and aborts it at every stage."""
        try:
            self._leave(record)
        finally:
            self._report_failure(record, error)

    def _leave(self, record: RequestRecord) -> None:
        """Aborts the request at every stage."""
        self._drop(record)
        for stage_id, instance_id in record.instances.items():
            stage = self._stages[instance_id]
            stage.num_requests -= stage_id in record.pending
            stage.abort([record.request_id])

    def _drop(self, record: RequestRecord) -> None:
        del self._records[record.request_id]
        self._retried.pop(record.request.request_id, None)

    def _report_failure(self, record: RequestRecord, error: RequestError) -> None:
        stage = None if error.stage_id is None else self._config.stages[error.stage_id].name
        try:
            self._observer.request_ended(record.summarize(type(error).__name__, stage))
        finally:
            record.fail(error)


@contextlib.contextmanager
def _continuing() -> Iterator[None]:
    """Logs what one request raises at the end of the pipeline: the others have to end, too."""
    try:
        yield
    except Exception:
        logger.exception("a request could not be ended properly")
