# SPDX-License-Identifier: Apache-2.0
"""What both omni schedulers add to vLLM's: a request's additional information, held requests, and recovery after a step
that raised.

A step skips a held request, and no other: it keeps its place and, as long as no other request needs them, its blocks.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_omni.core.sched.output import OmniNewRequestData, OmniRequest, OmniSchedulerOutput, StepRecord


class OmniSchedulerMixin(Scheduler):
    """Holds requests, and adds their input and the record of the step to what it schedules.

    vLLM decides everything else about which requests are scheduled. `OmniInputProcessor` makes every request an
    `OmniRequest`; any other is passed on unchanged.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_scheduled: Callable[[StepRecord], None] = lambda step: None
        """Called with each step that was scheduled, before it is computed."""
        self._isolated: dict[str, OmniRequest] = {}
        self._alone: OmniRequest | None = None

    def omni_request(self, req_id: str) -> OmniRequest:
        request = self.requests[req_id]
        assert isinstance(request, OmniRequest)
        return request

    def schedule(self, throttle_prefills: bool = False) -> OmniSchedulerOutput:
        started = time.perf_counter()
        self._alone = self._next_alone()
        self._order_requests()
        scheduled = super().schedule(throttle_prefills)
        output = OmniSchedulerOutput.from_base(scheduled, step=self._record(scheduled, started))
        self.on_scheduled(output.step)
        if not output.num_scheduled_tokens:
            self._preempt_held()
        self._send_input(output)
        return output

    def _record(self, output: SchedulerOutput, started: float) -> StepRecord:
        requests = [self.requests[req_id] for req_id in output.num_scheduled_tokens]
        num_twins = sum(isinstance(request, OmniRequest) and request.is_unconditional for request in requests)
        step = StepRecord(
            started=started,
            num_tokens=output.total_num_scheduled_tokens,
            num_sequences=max(len(requests) - num_twins, min(len(requests), 1)),
        )
        for request in requests:
            external_id = request.external_req_id if isinstance(request, OmniRequest) else request.request_id
            known = step.num_computed_tokens.get(external_id, 0)
            step.num_computed_tokens[external_id] = max(known, request.num_computed_tokens)
        return step

    def _send_input(self, output: OmniSchedulerOutput) -> None:
        """Adds the input of the step's requests that the model runner does not have."""
        output.scheduled_new_reqs = [self._with_additional_information(data) for data in output.scheduled_new_reqs]
        for req_id in output.num_scheduled_tokens:
            request = self.requests[req_id]
            if isinstance(request, OmniRequest) and request.may_resend_input:
                output.step.num_sent_chunks[req_id] = request.num_sent_chunks

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        assert isinstance(scheduler_output, OmniSchedulerOutput)
        step = scheduler_output.step
        step.has_output = True
        structured = self._structured_requests(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values() if structured else ():
            for ended in client.outputs:
                if ended.finish_reason is FinishReason.ERROR and ended.request_id in structured:
                    ended.stop_reason = _why_refused(structured[ended.request_id], ended.new_token_ids)
        for req_id, num_chunks in step.num_sent_chunks.items():
            request = self.requests.get(req_id)
            if isinstance(request, OmniRequest) and request.num_output_tokens:
                request.drop_sent_input(num_chunks)
        return outputs

    def _structured_requests(self, output: SchedulerOutput) -> dict[str, StructuredOutputRequest]:
        """The requests with a grammar, of a step and of those that have failed to start."""
        if not (output.has_structured_output_requests or self.grammar_compile_error_reqs):
            return {}
        constraints = {
            req_id: self.requests[req_id].structured_output_request
            for req_id in (*output.num_scheduled_tokens, *self.grammar_compile_error_reqs)
            if req_id in self.requests
        }
        return {req_id: constraint for req_id, constraint in constraints.items() if constraint is not None}

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            if (grammar := grammar_of(request)) is not None:
                grammar.cancel()  # if it has not begun
        return finished

    def restart_requests(self, known_to_workers: set[str]) -> None:
        """Computes every request again, as after a preemption, when a step has raised.

        A request that has tokens keeps them and its state in the workers. Any other is sent to them again, as new.
        Nothing else of the step is used: blocks can be marked as filled without being so, and a request that the step
        skipped can be in no queue.

        Args:
            known_to_workers: Requests of which a worker holds state.

        Raises:
            RuntimeError: No request holds some allocated blocks, so that the prefix cache cannot be cleared.
        """
        self.running = []
        self.waiting, self.kv_holding_waiting = create_request_queue(self.policy), create_request_queue(self.policy)
        self.deferred_waiting.clear()
        now = time.monotonic()
        for request in reversed(self.requests.values()):  # Each is put before the one after it.
            self._restart(request, now)
        has_tokens = {req_id for req_id, request in self.requests.items() if request.num_output_tokens}
        self.finished_req_ids = (self.finished_req_ids | known_to_workers | self.requests.keys()) - has_tokens
        self.prev_step_scheduled_req_ids.clear()
        if not self.reset_prefix_cache():
            raise RuntimeError("the step that raised has left blocks of the KV cache that no request holds")

    def _restart(self, request: Request, now: float) -> None:
        assert isinstance(request, OmniRequest)
        request.num_sent_chunks = 0
        if self._is_blocked_waiting_status(request.status):
            self._enqueue_waiting_request(request)
            return
        request.num_in_flight_tokens = 0
        request.status = RequestStatus.RUNNING
        self._preempt_request(request, now)
        if not request.num_output_tokens:
            request.status, request.num_preemptions = RequestStatus.WAITING, 0

    def has_work(self) -> bool:
        """Whether a step would do anything: compute something, or report ended requests to the workers."""
        return self.has_finished_requests() or not all(map(_cannot_run, self.requests.values()))

    def isolate(self, req_id: str, num_tokens: int) -> None:
        """Computes a request in steps of its own, every other step, until it has computed this many tokens.

        For requests of a step that raised: the one that raises again, alone, is the cause.
        """
        request = self.omni_request(req_id)
        request.alone_until = max(request.alone_until, num_tokens)
        self._isolated[req_id] = request

    def _next_alone(self) -> OmniRequest | None:
        """The isolated request that this step computes, if any."""
        if not self._isolated:
            return None
        self._isolated = {
            req_id: request
            for req_id, request in self._isolated.items()
            if self.requests.get(req_id) is request and request.is_isolated
        }
        others_wait = self._alone is not None and any(
            not (_is_starved(request) or request.request_id in self._isolated) for request in self.requests.values()
        )
        if others_wait:
            return None
        return next((request for request in self._isolated.values() if not request.is_starved), None)

    def _is_held(self, request: Request) -> bool:
        if _is_starved(request):
            return True
        if self._alone is not None:
            return request is not self._alone
        return request.request_id in self._isolated

    def _order_requests(self) -> None:
        """Called before vLLM's scheduling: it takes running requests, then waiting ones, in the order of the lists."""
        held = [request for request in self.running if self._is_held(request)]
        if not held:
            return
        for request in held:
            request.next_decode_eligible_step = self.current_step + 2
        # vLLM preempts from the end of the list when blocks are missing.
        self.running.sort(key=self._is_held)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return not self._is_held(request) and super()._handle_blocked_waiting_request(request)

    def _preempt_held(self) -> None:
        """Nothing could run: if a request waits for blocks of a held one, the held one is preempted."""
        waits = any(request.status in READY and not self._is_held(request) for request in self.waiting)
        if waits and self.running and self._is_held(self.running[-1]):
            self._preempt_request(self.running.pop(), time.monotonic())

    def _with_additional_information(self, data: NewRequestData) -> NewRequestData:
        request = self.requests[data.req_id]
        if not isinstance(request, OmniRequest):
            return data
        is_plain = request.additional_information is None and request.is_input_complete and request.emits_rows
        if is_plain and request.window is None and request.pair is None:
            return data
        # The runner keeps it until the request ends, preemptions included: with the first token it is dropped here.
        return OmniNewRequestData.from_base(
            data,
            additional_information=request.additional_information,
            is_input_complete=request.is_input_complete,
            emits_rows=request.emits_rows,
            window=request.window,
            pair=request.pair,
        )


READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _cannot_run(request: Request) -> bool:
    grammar = grammar_of(request)
    return _is_starved(request) or (grammar is not None and not grammar.done())


def grammar_of(request: Request) -> Future[StructuredOutputGrammar] | None:
    """The future grammar of a request, until vLLM has taken it."""
    constraint = request.structured_output_request
    grammar = None if constraint is None else constraint._grammar
    return grammar if isinstance(grammar, Future) else None


def _why_refused(constraint: StructuredOutputRequest, new_token_ids: list[int]) -> str:
    """Why vLLM has ended a request with an error, that has a grammar."""
    if isinstance(error := constraint.grammar, Exception):
        return f"structured output: the grammar cannot be compiled: {error}"
    if new_token_ids:
        return "structured output: the grammar allows no token here; it must match some text that ends"
    return ""


def _is_starved(request: Request) -> bool:
    return isinstance(request, OmniRequest) and request.is_starved
