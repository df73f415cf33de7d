# SPDX-License-Identifier: Apache-2.0
"""The scheduler of autoregressive stages."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.output import OmniSchedulerOutput
from vllm_omni.payloads import AdditionalInformationPayload


class OmniARScheduler(OmniSchedulerMixin):
    """vLLM's scheduler, with requests whose input arrives while they run.

    Such a request is scheduled only while it has the input that the step needs. This includes its computation after a
    preemption, since the input for its last token may still be missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_chunks: set[str] = set()

    def add_input(
        self, req_id: str, information: AdditionalInformationPayload | None, num_ready_tokens: int | None, is_last: bool
    ) -> None:
        """Adds a chunk of input, which reaches the model with the request's next step.

        Args:
            num_ready_tokens: Tokens that can be computed now; None: all, as after the last chunk.
        """
        request = self.omni_request(req_id)
        request.num_ready_tokens = None if is_last else num_ready_tokens
        request.add_chunk(information, is_last)
        self._with_chunks.add(req_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        return self._with_input_chunks(output) if self._with_chunks else output

    def _with_input_chunks(self, output: SchedulerOutput) -> SchedulerOutput:
        self._with_chunks &= self.requests.keys()
        due = self._with_chunks & output.num_scheduled_tokens.keys()
        self._with_chunks -= due
        chunks = {}
        for req_id in due:
            request = self._sent[req_id] = self.omni_request(req_id)
            chunks[req_id] = request.send_chunks()
        return OmniSchedulerOutput.from_base(output, input_chunks=chunks) if chunks else output

    def restart_requests(self, known_to_workers: set[str]) -> None:
        super().restart_requests(known_to_workers)
        self._with_chunks |= {req_id for req_id in self.requests if self.omni_request(req_id).input_chunks}
