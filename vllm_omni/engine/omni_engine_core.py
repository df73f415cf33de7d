# SPDX-License-Identifier: Apache-2.0
"""The engine core of a stage: vLLM's, which passes additional information to the scheduler and can be recovered."""

import weakref
from typing import ClassVar, cast

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.request import Request

from vllm_omni.core.sched.guided_scheduler import GuidedScheduler
from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.output import OmniRequest, OmniSchedulerOutput, StepRecord
from vllm_omni.engine.grammars import OmniStructuredOutputManager
from vllm_omni.payloads import OmniEngineCoreRequest


class OmniEngineCore(EngineCore):
    """An engine core in the calling process. `adopt` makes it of vLLM's class, so it has no attributes of its own."""

    # vLLM's distributed groups belong to the process, so its last engine destroys them.
    _alive: ClassVar[weakref.WeakSet[EngineCore]] = weakref.WeakSet()

    @classmethod
    def adopt(cls, client: InprocClient) -> "OmniEngineCore":
        """vLLM builds its class inside `InprocClient`; this changes one instance instead of that module."""
        core: EngineCore = client.engine_core
        core.__class__ = cls
        assert isinstance(core, cls)
        OmniStructuredOutputManager.adopt(core.structured_output_manager)
        if core.batch_queue is not None:
            core.step_fn = core.step_with_batch_queue
        cls._alive.add(core)
        client._finalizer.detach()  # It is bound to the shutdown of vLLM's class.
        client._finalizer = weakref.finalize(client, core.shutdown)
        return core

    def shutdown(self) -> None:
        self._alive.discard(self)
        if not self._alive:
            super().shutdown()
            return
        self.structured_output_manager.clear_backend()
        self.model_executor.shutdown()
        self.scheduler.shutdown()

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        scheduled, wave = super().preprocess_add_request(request)
        if isinstance(request, OmniEngineCoreRequest):
            OmniRequest.adopt(scheduled, request)
            assert isinstance(scheduled, OmniRequest)
            if request.forced_token_ids:
                self.grammars.force(scheduled, request.forced_token_ids)
            elif scheduled.use_structured_output:
                self.grammars.grammar_init(scheduled)
            if request.token_information:
                self._hash_rows(scheduled, request.token_information)
            if request.guidance is not None:
                self._add_twin(scheduled, request, request.guidance.scale)
        return scheduled, wave

    def _hash_rows(self, scheduled: Request, names: list[str]) -> None:
        assert isinstance(scheduled, OmniRequest)
        scheduled.hash_rows(names, self.omni_scheduler.hash_block_size)

    def _add_twin(self, scheduled: Request, request: OmniEngineCoreRequest, scale: float) -> None:
        twin, _ = self.preprocess_add_request(request.make_twin())
        assert isinstance(scheduled, OmniRequest) and isinstance(twin, OmniRequest)
        scheduler = self.omni_scheduler
        assert isinstance(scheduler, GuidedScheduler), "OmniInputProcessor refuses guidance for other stages"
        scheduled.pair_with(twin, scale)
        scheduler.check_pair(scheduled)

    @property
    def omni_scheduler(self) -> OmniSchedulerMixin:
        assert isinstance(self.scheduler, OmniSchedulerMixin)
        return self.scheduler

    @property
    def grammars(self) -> OmniStructuredOutputManager:
        assert isinstance(self.structured_output_manager, OmniStructuredOutputManager)
        return self.structured_output_manager

    def step_with_batch_queue(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """Raises what the sampling of the last step has raised, where vLLM would first compute the next one, of tokens
        that were never sampled."""
        if self.batch_queue:
            last, _, _ = self.batch_queue[0]
            if last.done():
                last.result()
        return super().step_with_batch_queue()

    @property
    def is_computing(self) -> bool:
        """Whether steps compute tokens that were not fetched: never without asynchronous scheduling."""
        return any(scheduled.num_scheduled_tokens for _, scheduled, _ in self.batch_queue or ())

    def failed_steps(self, in_flight: list[StepRecord]) -> list[StepRecord]:
        """The steps that an exception is about, of those whose outputs were not processed; none if it came out of
        scheduling."""
        queued = [cast(OmniSchedulerOutput, scheduled).step for _, scheduled, _ in self.batch_queue or ()]
        failed = [step for step in in_flight if not any(step is other for other in queued)]
        if not failed and self.batch_queue and self.batch_queue[0][0].done():
            return queued[:1]
        return failed

    def restart_requests(self) -> None:
        """Computes every request again after an exception inside a step, whatever state it left.

        Results of the step are not used: cached blocks and encoder outputs can be marked as filled without being so.
        Neither are those of steps beside it.
        """
        if self.batch_queue is not None:
            self.batch_queue.clear()
        # The workers may have missed which requests were finished before: the next step repeats them.
        known_to_workers: list[list[str]] = self.collective_rpc("discard_step")
        self.scheduler.reset_encoder_cache()
        self.model_executor.reset_encoder_cache()
        self.omni_scheduler.restart_requests({req_id for req_ids in known_to_workers for req_id in req_ids})
