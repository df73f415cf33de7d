# SPDX-License-Identifier: Apache-2.0
"""The scheduler of autoregressive stages."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.guided_scheduler import GuidedScheduler
from vllm_omni.core.sched.omni_scheduler_mixin import READY
from vllm_omni.core.sched.output import OmniModelRunnerOutput, OmniRequest, OmniSchedulerOutput
from vllm_omni.core.sched.row_cache import RequestRows, RowCache
from vllm_omni.payloads import AdditionalInformationPayload


class OmniARScheduler(GuidedScheduler):
    """vLLM's scheduler, with requests whose input arrives while they run, requests that the model ends, and guidance.

    Of the first, one is scheduled only while it has the input that the step needs. This includes its computation after
    a preemption, since the input for its last token may still be missing.

    Where rows leave the engine and prefixes are cached, a request whose rows are read gets those of the tokens that
    were found in the cache with the first rows that it computes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_chunks: set[str] = set()
        self._row_cache: RowCache | None = None

    def cache_rows(self, max_bytes: int) -> None:
        """Keeps the rows of tokens in the prefix cache. Call it before the first request, where rows leave the engine.

        Args:
            max_bytes: Memory of the host for these rows, at most.
        """
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        self._row_cache = RowCache(self.hash_block_size, num_blocks, max_bytes)

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

    def schedule(self, throttle_prefills: bool = False) -> OmniSchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self._row_cache is not None:
            for data in output.scheduled_new_reqs:
                self._read_rows(self._row_cache, self.requests[data.req_id], data.num_computed_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, OmniModelRunnerOutput):
            self._mark_ended(model_runner_output.ended_req_ids)
        if self._row_cache is None or model_runner_output.pooler_output is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        with_rows = self._add_found_rows(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in with_rows:  # Only now they have the tokens of the step, and the hashes of blocks with these.
            request.rows.keep_blocks(self._row_cache, request.block_hashes)
        return outputs

    # Requests of several sequences.

    def _order_requests(self) -> None:
        """Has each request the same share of the sequences that run: one of many does not make others wait for all of
        them. Of the order that vLLM would take, only that of sequences of one request changes."""
        super()._order_requests()
        if self.waiting:
            self._order_waiting()
            self._preempt_for_others()

    def _order_waiting(self) -> None:
        """Each sequence waits behind those of requests of its priority that have fewer before them."""
        counts = Counter(map(_owner, self.running))
        ranks = {}
        for request in self.waiting:
            owner = _owner(request)
            ranks[request.request_id] = (self._priority(request), counts[owner])
            counts[owner] += 1
        ordered = sorted(self.waiting, key=lambda request: ranks[request.request_id])
        self.waiting = create_request_queue(SchedulingPolicy.FCFS)
        for request in ordered:
            self.waiting.add_request(request)

    def _preempt_for_others(self) -> None:
        """Where there is no place, a request that has fewer sequences running gets that of one with more."""
        num_places = self.max_num_running_reqs - len(self.running)
        counts = Counter(map(_owner, self.running))
        ready = [request for request in self.waiting if request.status in READY and not self._is_held(request)]
        for request in ready[max(num_places, 0) :]:
            owner, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
            if most < counts[_owner(request)] + 2:
                break
            victim = next(each for each in reversed(self.running) if _owner(each) == owner)
            if self._priority(victim) < self._priority(request):
                break
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())
            counts[owner] -= 1
            counts[_owner(request)] += 1
        self._order_waiting()

    def _priority(self, request: Request) -> int:
        return request.priority if self.policy is SchedulingPolicy.PRIORITY else 0

    # Rows of tokens that were found in the prefix cache.

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Finds cached blocks, without those whose rows would be missing."""
        if self._row_cache is None or not _needs_rows(request):
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        hashes = request.block_hashes
        # What the runner has of a preempted request begins with the token after those that were found.
        num_blocks = self._row_cache.count(hashes)
        if request.num_preemptions:
            num_blocks = cast(OmniRequest, request).rows.num_found // self._row_cache.block_size
        request.block_hashes = hashes[:num_blocks]
        try:
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        finally:
            request.block_hashes = hashes

    def _read_rows(self, cache: RowCache, request: Request, num_found: int) -> None:
        if _needs_rows(request):
            found = cache.read(request.block_hashes, num_found) if num_found else {}
            cast(OmniRequest, request).rows = RequestRows(found, num_found)

    def _add_found_rows(self, output: ModelRunnerOutput) -> list[OmniRequest]:
        """The requests of which rows leave."""
        all_rows: Any = output.pooler_output
        with_rows = []
        for index, req_id in enumerate(output.req_ids):
            request = self.requests.get(req_id)
            if all_rows[index] is not None and isinstance(request, OmniRequest) and _emits_all_rows(request):
                all_rows[index] = request.rows.leave(all_rows[index], request.num_tokens)
                with_rows.append(request)
        return with_rows

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        if is_reset and self._row_cache is not None:
            self._row_cache.clear()
        return is_reset

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        if not (isinstance(request, OmniRequest) and request.ends_here):
            return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        request.status = RequestStatus.FINISHED_STOPPED
        return [], True

    def _mark_ended(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            request = self.requests.get(req_id)  # None: aborted meanwhile
            if isinstance(request, OmniRequest):
                request.ends_here = _can_end(request)

    def _send_input(self, output: OmniSchedulerOutput) -> None:
        self._with_chunks &= self.requests.keys()
        due = self._with_chunks & output.num_scheduled_tokens.keys()
        self._with_chunks -= due
        output.input_chunks = {req_id: self.omni_request(req_id).send_chunks() for req_id in due}
        super()._send_input(output)

    def restart_requests(self, known_to_workers: set[str]) -> None:
        super().restart_requests(known_to_workers)
        self._with_chunks |= {req_id for req_id in self.requests if self.omni_request(req_id).input_chunks}


class OmniAsyncARScheduler(OmniARScheduler, AsyncScheduler):
    """The scheduler of stages of text with asynchronous scheduling: a step is scheduled while the one before it is
    computed, so tokens of a request that are not known yet count as computed, as vLLM's `num_output_placeholders`."""


def _owner(request: Request) -> str:
    """What the sequences of one request have in common. The two of a request with guidance run together anyway."""
    if isinstance(request, OmniRequest) and request.pair is None:
        return request.external_req_id
    return request.request_id


def _needs_rows(request: Request) -> bool:
    """Whether rows of its prompt are still to leave."""
    return isinstance(request, OmniRequest) and _emits_all_rows(request) and not request.num_output_tokens


def _emits_all_rows(request: OmniRequest) -> bool:
    """Whether rows of its prompt leave, besides those of tokens that it generates."""
    return request.emits_rows and not request.reads_rows


def _can_end(request: Request) -> bool:
    """Whether the request may end here, as vLLM decides it for stop tokens."""
    params = request.sampling_params
    assert params is not None, "stages take no pooling requests"
    return not params.ignore_eos and request.num_output_tokens >= params.min_tokens
