# SPDX-License-Identifier: Apache-2.0
"""The scheduler of autoregressive stages."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.output import OmniRequest, OmniSchedulerOutput
from vllm_omni.payloads import AdditionalInformationPayload


class OmniARScheduler(OmniSchedulerMixin):
    """vLLM's scheduler, with requests whose input arrives while they run.

    Such a request takes part in a step only while it has what the step needs. That goes for recomputing it after a
    preemption, too, since the last token it has may be one that it cannot compute yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fed: set[str] = set()

    def await_input(self, req_id: str, num_ready_tokens: int | None) -> None:
        """Says of a request that was just added that more input follows."""
        request = self._omni_request(req_id)
        request.is_input_complete = False
        request.num_ready_tokens = num_ready_tokens

    def add_input(
        self,
        req_id: str,
        information: AdditionalInformationPayload | None,
        num_ready_tokens: int | None,
        is_last: bool,
    ) -> None:
        """Adds a chunk of input, which reaches the model with the request's next step.

        Args:
            num_ready_tokens: What can be computed now; None: all. The last chunk lifts the bound anyway.
        """
        request = self._omni_request(req_id)
        request.num_ready_tokens = None if is_last else num_ready_tokens
        request.add_chunk(information, is_last)
        self._fed.add(req_id)

    def discard_rows(self, req_id: str) -> None:
        """Says of a request that was just added that nobody reads its rows."""
        self._omni_request(req_id).emits_rows = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        return self._with_input_chunks(output) if self._fed else output

    def _with_input_chunks(self, output: SchedulerOutput) -> SchedulerOutput:
        self._fed &= self.requests.keys()
        due = self._fed & output.num_scheduled_tokens.keys()
        self._fed -= due
        chunks = {}
        for req_id in due:
            request = self._sent[req_id] = self._omni_request(req_id)
            chunks[req_id] = request.send_chunks()
        return OmniSchedulerOutput.from_base(output, chunks) if chunks else output

    def restart_requests(self, known_to_workers: set[str]) -> None:
        super().restart_requests(known_to_workers)
        self._fed |= {req_id for req_id in self.requests if self._omni_request(req_id).input_chunks}

    def _omni_request(self, req_id: str) -> OmniRequest:
        request = self.requests[req_id]
        assert isinstance(request, OmniRequest)
        return request
