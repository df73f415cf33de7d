# SPDX-License-Identifier: Apache-2.0
"""The scheduler of stages that turn a whole request into its output in one step."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin


class OmniGenerationScheduler(OmniSchedulerMixin):
    """Schedules whole prompts, many in one step, and ends each request after its step.

    Without KV cache and chunked prefill vLLM itself schedules a prompt whole or not at all, so only two things
    differ: a request ends without a sampled token, and a prompt that can never fit into a step fails instead of
    blocking all others (`OmniInputProcessor` refuses it before that).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unschedulable: list[str] = []
        self._refused: list[Request] = []

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.num_prompt_tokens > self.max_num_scheduled_tokens:
            self._unschedulable.append(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._unschedulable:
            self._refused += self.finish_requests(self._unschedulable, RequestStatus.FINISHED_ERROR)
            self._unschedulable = []
        return super().schedule(throttle_prefills)

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
