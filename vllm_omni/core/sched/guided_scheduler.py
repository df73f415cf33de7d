# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance: a request that is two sequences, which are scheduled, preempted and ended together.

For vLLM they are two requests, each with KV blocks of its own. The model runner combines their logits
(`worker/guided_pairs.py`); a step that would sample for one of them only samples for neither, and that row is computed
again. Outputs of the unconditional sequence, the *twin*, never leave the scheduler.
"""

import time
from collections.abc import Iterable
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.output import OmniRequest, OmniSchedulerOutput
from vllm_omni.errors import InvalidRequestError


class GuidedScheduler(OmniSchedulerMixin):
    """vLLM's scheduler, with pairs of sequences.

    A pair always ends: it fits into the KV cache alone (`check_pair`), the two are preempted together, and only one
    pair at a time can have one sequence running and one waiting, so that no two of these wait for each other's blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._twins: dict[str, OmniRequest] = {}  # the unconditional sequences
        self._split: list[OmniRequest] = []  # running sequences whose other one was preempted

    def check_pair(self, request: OmniRequest) -> None:
        """
        Raises:
            InvalidRequestError: The two sequences do not fit into the KV cache together.
        """
        assert request.twin is not None
        lengths = [sequence.num_prompt_tokens + request.max_tokens for sequence in (request, request.twin)]
        groups = self.kv_cache_config.kv_cache_groups
        needed = sum(cdiv(length, group.kv_cache_spec.block_size) for group in groups for length in lengths)
        available = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # without vLLM's null block
        if needed > available:
            raise InvalidRequestError(
                f"with guidance it takes {needed} blocks of the KV cache, which has {available}: lower max_tokens, or "
                "raise the stage's gpu_memory_utilization or kv_cache_memory_bytes",
                request.external_req_id,
            )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        twin = _twin_of(request)
        if twin is not None:
            self._twins[twin.request_id] = twin
            super().add_request(twin)

    def schedule(self, throttle_prefills: bool = False) -> OmniSchedulerOutput:
        if self._split:
            self._preempt_split()
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._twins:
            for client in outputs.values():
                client.outputs = [output for output in client.outputs if output.request_id not in self._twins]
            self._rewind()
            self._finish_twins()
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if self._twins and request_ids is not None:
            request_ids = self._with_twins([request_ids] if isinstance(request_ids, str) else request_ids)
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._unpair(request.request_id)
        return [request for request in finished if not _is_twin(request)]

    def isolate(self, req_id: str, num_tokens: int) -> None:
        for each in self._with_twins([req_id]):
            super().isolate(each, num_tokens)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._twins:
            num_running = sum(map(_is_twin, self.running))
            stats.num_running_reqs -= num_running
            num_deferred = sum(map(_is_twin, self.deferred_waiting))
            stats.num_skipped_waiting_reqs -= num_deferred
            stats.num_waiting_reqs -= len(self._twins) - num_running - num_deferred
        return stats

    # ---- scheduled together

    def _is_held(self, request: Request) -> bool:
        twin = _twin_of(request)
        if twin is None:
            return super()._is_held(request)
        if _waits_for(request, twin):
            return True
        if self._alone in (request, twin):
            return False
        return super()._is_held(request) or super()._is_held(twin)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return self._may_start(request) and super()._handle_blocked_waiting_request(request)

    def _may_start(self, request: Request) -> bool:
        twin = _twin_of(request)
        if twin is None or twin.status == RequestStatus.RUNNING:
            return True
        return not any(_is_half_running(pair) for pair in self._twins.values())

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        twin = _twin_of(request)
        if twin is not None and twin.status == RequestStatus.RUNNING:
            self._split.append(twin)

    def _preempt_split(self) -> None:
        split, self._split = self._split, []
        for request in split:
            if request.status == RequestStatus.RUNNING and _is_half_running(request):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())

    # ---- one token, one end

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        if not _is_twin(request):
            return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        request.append_output_token_ids(new_token_ids)
        return new_token_ids, False

    def _rewind(self) -> None:
        """A sequence that was computed to its end without a token waits for its twin."""
        for request in self.running:
            if _twin_of(request) is not None and request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1

    def _finish_twins(self) -> None:
        ended = [req_id for req_id, twin in self._twins.items() if twin.twin is not None and twin.twin.is_finished()]
        if ended:
            self.finish_requests(ended, RequestStatus.FINISHED_STOPPED)

    def _with_twins(self, req_ids: Iterable[str]) -> list[str]:
        sequences = list(req_ids)
        twins = (_twin_of(self.requests[req_id]) for req_id in sequences if req_id in self.requests)
        return [*sequences, *(twin.request_id for twin in twins if twin is not None)]

    def _unpair(self, req_id: str) -> None:
        """The two refer to each other: ended, they would wait for the garbage collection."""
        twin = self._twins.pop(req_id, None)
        if twin is not None and twin.twin is not None:
            twin.twin.twin = None
            twin.twin = None


def _twin_of(request: Request) -> OmniRequest | None:
    return request.twin if isinstance(request, OmniRequest) else None


def _is_twin(request: Request) -> bool:
    return isinstance(request, OmniRequest) and request.is_unconditional


def _waits_for(request: Request, twin: Request) -> bool:
    """Whether a running sequence could only compute its last row again."""
    is_half_running = request.status == RequestStatus.RUNNING != twin.status
    return is_half_running and request.num_computed_tokens == request.num_tokens - 1


def _is_half_running(request: OmniRequest) -> bool:
    assert request.twin is not None
    return (request.status == RequestStatus.RUNNING) != (request.twin.status == RequestStatus.RUNNING)
