# SPDX-License-Identifier: Apache-2.0
"""Handles of stages without processes, which record what is sent."""

from typing import Any

from vllm_omni.config.stage_config import OmniStageConfig, StageInstance
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import Message, PeerUpMessage
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.orchestrator.omni_stage import StageState


class FakeStage:
    """Has the interface of `OmniStage`.

    Attributes:
        log: What was sent to all stages, in order: (stage name, message), or (stage name, (request id, number)) for a
            submit.
        submits: The arguments of `submit`, by request id.
        aborted: Requests that were aborted here.
        submit_error: Raised by `submit` and `extend`.
    """

    def __init__(self, instance: StageInstance, log: list[tuple[str, Any]], max_queued: int = 2) -> None:
        self.instance = instance
        self.num_requests = 0
        self.node = self.node_name = ""
        self.state = StageState.READY
        self.epoch = 0
        self.death = ""
        self.credit = Credit(max_queued, 1 << 20)
        self.log = log
        self.submits: dict[str, dict[str, Any]] = {}
        self.aborted: list[str] = []
        self.submit_error: Exception | None = None

    @property
    def config(self) -> OmniStageConfig:
        return self.instance.stage

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def stage_id(self) -> int:
        return self.config.stage_id

    @property
    def instance_id(self) -> int:
        return self.instance.instance_id

    @property
    def label(self) -> str:
        return self.instance.label

    @property
    def is_ready(self) -> bool:
        return self.state is StageState.READY

    def peer_up(self, node: str) -> PeerUpMessage:
        return PeerUpMessage(instance_id=self.instance_id, epoch=self.epoch, address=f"{self.name}{self.epoch}")

    def submit(self, request: StageRequest, number: int, **arguments: Any) -> None:
        assert self.is_ready
        if self.submit_error is not None:
            raise self.submit_error
        self.submits[request.request_id] = arguments
        self.log.append((self.name, (request.request_id, number)))
        if not arguments["sources"]:
            self.credit.spend(1, 0)

    def extend(self, request_id: str, stage_input: StageInput, is_last: bool) -> None:
        assert self.is_ready and request_id in self.submits
        if self.submit_error is not None:
            raise self.submit_error
        self.log.append((self.name, (request_id, stage_input.prompt, is_last)))

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def send(self, message: Message) -> None:
        if self.is_ready:
            self.log.append((self.name, message))

    def on_ready(self, address: str, remote_address: str) -> None:
        self.state = StageState.READY

    def on_death(self, how: str) -> None:
        self.state = StageState.RESTARTING
        self.death = how
        self.epoch += 1
