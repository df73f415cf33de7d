# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running pipeline: verbs for its stages, and a pause of all of them.

Belongs to the orchestrator's thread. Does not depend on sockets or processes.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni.control import AnyVerb, CommitWeights, DropWeights, Freeze, Sleep, Thaw, UpdateWeightVersion, WakeUp
from vllm_omni.distributed.messages import ControlMessage, ControlResult
from vllm_omni.errors import ControlError, InvalidControlError, PipelineClosedError
from vllm_omni.launch.spec_factory import StageWeights
from vllm_omni.launch.stage_handle import StageHandle


@dataclass
class _Call:
    """A verb, and the replicas that have to do it.

    Attributes:
        timeout: Seconds from its begin.
        deadline: As `time.monotonic()`.
        waiting: Those that have not answered.
        answers: Those of the others, by instance id.
    """

    verb: AnyVerb
    stages: Sequence[StageHandle]
    timeout: float
    result: Future[list[Any]]
    deadline: float = math.inf
    waiting: set[int] = field(default_factory=set)
    answers: dict[int, ControlResult] = field(default_factory=dict)


class ControlCalls:
    """Sends verbs to replicas, one verb after the other, and gathers their answers.

    A replica that dies fails the verb that it was told. One that starts while the pipeline is frozen or asleep is, too.

    Attributes:
        is_frozen: The last of `Freeze` and `Thaw` was `Freeze`.
    """

    def __init__(
        self,
        stages: Mapping[int, StageHandle],
        weights: dict[int, StageWeights] | None = None,
        on_weights: Callable[[StageHandle], None] = lambda stage: None,
    ) -> None:
        """
        Args:
            stages: By instance id.
            weights: What their processes have to have, by stage id; changed with them.
            on_weights: Called for a stage of which `has_weights` may have changed.
        """
        self._stages = stages
        self._weights = {} if weights is None else weights
        self._on_weights = on_weights
        self._number = 0  # of the verb that runs, or of the last one
        self._calls: deque[_Call] = deque()  # the first one runs
        self.is_frozen = False
        self._asleep: dict[int, Sleep] = {}  # how, by stage id

    @property
    def due(self) -> float:
        """When `on_timer` must be called (`time.monotonic()`)."""
        return self._calls[0].deadline if self._calls else math.inf

    def call(self, verb: AnyVerb, stage_ids: Sequence[int], timeout: float, result: Future[list[Any]]) -> None:
        """
        Args:
            stage_ids: All replicas of these stages have to do it.
            timeout: Seconds until they must have done it, from its begin.
            result: Gets what each returns, in the order of the replicas, or a `ControlError`.
        """
        stages = [stage for stage in self._stages.values() if stage.stage_id in stage_ids]
        self._calls.append(_Call(verb, stages, timeout, result))
        if len(self._calls) == 1:
            self._begin()

    def _begin(self) -> None:
        while self._calls:
            call = self._calls[0]
            call.deadline = time.monotonic() + call.timeout
            self._number += 1
            if isinstance(call.verb, Freeze | Thaw):  # A replica that restarts follows when it is ready.
                self.is_frozen = isinstance(call.verb, Freeze)
            if isinstance(call.verb, Sleep | WakeUp):
                self._asleep = {}
            if isinstance(call.verb, Sleep):
                self._asleep = {stage.stage_id: call.verb for stage in call.stages}
            if isinstance(call.verb, Freeze | Thaw | DropWeights | WakeUp):
                call.stages = [stage for stage in call.stages if stage.does_verbs]
            down = next((stage for stage in call.stages if not stage.does_verbs), None)
            if down is not None:
                self._fail(f"{down.label} is {down.state.value}: nothing was done; try again when it is ready")
                continue
            self._set_weights(call)
            call.waiting = {stage.instance_id for stage in call.stages}
            for stage in call.stages:
                stage.send(ControlMessage(number=self._number, verb=call.verb))
            if call.waiting:
                return
            self._calls.popleft().result.set_result([])

    def _set_weights(self, call: _Call) -> None:
        """Sets what processes have to have that start from now on: those that the verb does not reach die of it."""
        for stage_id in {stage.stage_id for stage in call.stages}:
            last = self._weights.get(stage_id, StageWeights())
            match call.verb:
                case CommitWeights():
                    self._weights[stage_id] = StageWeights(call.verb.weight_version, call.verb.weights_path)
                case UpdateWeightVersion():
                    self._weights[stage_id] = replace(last, version=call.verb.new_version)

    def has_weights(self, stage: StageHandle) -> bool:
        """Whether its process has the weights that it has to have."""
        return stage.weight_version == self._weights.get(stage.stage_id, StageWeights()).version

    def on_result(self, stage: StageHandle, message: ControlResult) -> None:
        if message.weight_version != stage.weight_version:
            stage.weight_version = message.weight_version
            self._on_weights(stage)
        if message.number != self._number or not self._calls:
            return  # Of a verb that took too long, or of one that nobody waits for.
        call = self._calls[0]
        call.waiting.discard(stage.instance_id)
        call.answers[stage.instance_id] = message
        if call.waiting:
            return
        answers = [call.answers[each.instance_id] for each in call.stages]
        error = next((answer for answer in answers if answer.error), None)
        if error is None:
            self._calls.popleft().result.set_result([answer.value for answer in answers])
        else:
            text = f"{self._stages[error.instance_id].label}: {error.error}"
            self._fail(text, InvalidControlError if error.invalid else ControlError)
        self._begin()

    def on_stage_down(self, stage: StageHandle) -> None:
        if self._calls and stage.instance_id in self._calls[0].waiting:
            self._fail(f"{stage.label} died before it had done it: {stage.death}")
            self._begin()

    def on_stage_up(self, stage: StageHandle) -> None:
        if self.is_frozen:
            stage.send(ControlMessage(number=0, verb=Freeze()))
        if stage.stage_id in self._asleep:
            stage.send(ControlMessage(number=0, verb=self._asleep[stage.stage_id]))

    def on_timer(self, now: float) -> None:
        if self._calls and self._calls[0].deadline <= now:
            labels = [self._stages[instance_id].label for instance_id in sorted(self._calls[0].waiting)]
            self._fail(f"{', '.join(labels)} did not answer in time; it may do it later")
            self._begin()

    def close(self, reason: str) -> None:
        """Ends all calls."""
        while self._calls:
            self._calls.popleft().result.set_exception(PipelineClosedError(reason))

    def _fail(self, text: str, kind: type[ControlError] = ControlError) -> None:
        """Ends the first call, and no other begins."""
        call = self._calls.popleft()
        call.result.set_exception(kind(f"{type(call.verb).__name__}: {text}"))
