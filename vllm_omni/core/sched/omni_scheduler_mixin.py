# SPDX-License-Identifier: Apache-2.0
"""What both omni schedulers add to vLLM's: additional information reaches the model runner with its request."""

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni.core.sched.output import OmniNewRequestData, OmniRequest


class OmniSchedulerMixin(Scheduler):
    """Rewraps newly scheduled requests. Which requests are scheduled stays vLLM's decision."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if output.scheduled_new_reqs:
            output.scheduled_new_reqs = [self._with_additional_information(data) for data in output.scheduled_new_reqs]
        return output

    def _with_additional_information(self, data: NewRequestData) -> NewRequestData:
        request = self.requests[data.req_id]
        if not isinstance(request, OmniRequest) or request.additional_information is None:
            return data
        # The runner keeps it until the request ends, preemptions included, so the bytes are not held twice.
        payload, request.additional_information = request.additional_information, None
        return OmniNewRequestData.from_base(data, payload)
