# SPDX-License-Identifier: Apache-2.0
"""The scheduler of stages that turn a whole request, or a window of one, into its output in one step."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.output import OmniRequest, OmniSchedulerOutput
from vllm_omni.core.urgency import Urgency


class OmniGenerationScheduler(OmniSchedulerMixin):
    """Schedules whole prompts, as many in one step as make one batch of the model, and ends each after its step.

    Without KV cache and chunked prefill vLLM itself schedules a prompt whole or not at all. So a request ends without a
    sampled token, a prompt that can never fit into a step fails instead of blocking all others (`OmniInputProcessor`
    refuses it before that), and the order is one for windows of streams:

    1. by priority;
    2. the first windows of streamed requests, in order of arrival: a client waits for the first sound;
    3. the window that is due first: the one that a player would first have to wait for. A request that is not streamed
       is due when it could have been played to its end, so it is not overtaken forever.

    Attributes:
        batch_tokens: Tokens of a step, unless its first prompt alone has more. By default as many as fit into it.
        max_prompt_tokens: Requests with longer prompts are refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch_tokens = self.max_prompt_tokens = self.max_num_scheduled_tokens
        self.policy = SchedulingPolicy.FCFS  # The order of the queue is that of `_order_requests`.
        self.waiting = create_request_queue(self.policy)
        self._unschedulable: list[str] = []
        self._refused: list[Request] = []

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.num_prompt_tokens > self.max_prompt_tokens:
            self._unschedulable.append(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> OmniSchedulerOutput:
        if self._unschedulable:
            self._refused += self.finish_requests(self._unschedulable, RequestStatus.FINISHED_ERROR)
            self._unschedulable = []
        return super().schedule(throttle_prefills)

    def _order_requests(self) -> None:
        super()._order_requests()
        waiting = sorted(self.waiting, key=_urgency)
        self.waiting = create_request_queue(self.policy)
        for request in waiting:
            self.waiting.add_request(request)
        self.max_num_scheduled_tokens = self._step_tokens(waiting)

    def _step_tokens(self, waiting: list[Request]) -> int:
        first = next((request.num_prompt_tokens for request in waiting if not self._is_held(request)), 0)
        return max(self.batch_tokens, first)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._finish_generated(outputs)
        self._report_refused(outputs)
        return outputs

    def _finish_generated(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        generated = [output for client in outputs.values() for output in client.outputs if not output.finished]
        for output in generated:
            output.finish_reason = FinishReason.STOP
        if generated:
            self.finish_requests([output.request_id for output in generated], RequestStatus.FINISHED_STOPPED)

    def _report_refused(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for request in self._refused:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                )
            )
        self._refused = []


def _urgency(request: Request) -> Urgency:
    window = request.window if isinstance(request, OmniRequest) else None
    if window is None:
        return Urgency(request.priority, False, request.arrival_time)
    return Urgency(request.priority, not (window.streams and window.is_first), window.due)
